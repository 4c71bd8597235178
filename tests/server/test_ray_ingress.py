"""The ingress of several models, before models that a test starts, stops and breaks."""

import asyncio
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm import ValidationError
from jaxllm.openai.errors import NotFoundError, UnavailableError
from jaxllm.server.auth import read_keys
from jaxllm.server.ray.models import read_models
from tests.server.test_ray import client_of

pytest.importorskip("ray.serve")

from jaxllm.server.body import BodyLimits  # noqa: E402
from jaxllm.server.ray.ingress import HostedModel, Models  # noqa: E402

MEGABYTE = 1 << 20


class Hosted(HostedModel):
    """A model whose start and whose end are as the test says."""

    def __init__(self, asked, keys):
        super().__init__(asked, self._never, keys)
        self.error: Exception | None = None  # of its start
        self.may_start = asyncio.Event()
        self.ended: list[str] = []
        self.close_error: Exception | None = None

    async def _never(self) -> Any:
        raise AssertionError

    async def start(self) -> None:
        try:
            await self.may_start.wait()
            if self.error is not None:
                raise self.error
            self.service = SimpleNamespace(  # type: ignore[assignment]
                engine=SimpleNamespace(is_running=True, check_health=self._healthy),
                body_limits=BodyLimits(100 * MEGABYTE, 60.0),
                is_ready=True,
                engine_metrics=SimpleNamespace(read=self._nothing),
                metrics=SimpleNamespace(registry=SimpleNamespace(collect=list)),
            )
        finally:
            await asyncio.sleep(0)
            self.ended.append("start")

    async def _healthy(self) -> None:
        pass

    async def _nothing(self) -> list[Any]:
        return []

    async def close(self) -> None:
        self.ended.append("close")
        if self.close_error is not None:
            raise self.close_error


def models_of(monkeypatch, *entries, **options):
    """Models of which the first is ready."""
    monkeypatch.setattr("jaxllm.server.ray.ingress._PATIENCE_S", 0.0)
    asked = read_models({"models": list(entries), "api_key": ["key"], **options})
    keys = read_keys(asked.server)
    hosted = [Hosted(one, keys) for one in asked.models]
    hosted[0].may_start.set()
    return hosted, Models(hosted, asked.server, keys)


def test_the_frontend_tells_that_a_model_failed_to_start(monkeypatch):
    async def check():
        (_, late, invalid), models = models_of(monkeypatch, *({"model": one} for one in "abc"))
        invalid.error = ValidationError("no such template")
        await models.check_health()
        await models.start()
        await models.check_health()
        invalid.may_start.set()
        await asyncio.wait(models._starting[::2])
        await models.check_health()  # another frontend would refuse this, too
        late.error = OSError("no tokenizer")
        late.may_start.set()
        await asyncio.wait(models._starting)
        with pytest.raises(OSError, match="no tokenizer"):
            await models.check_health()

    asyncio.run(check())


def test_all_models_are_closed(monkeypatch):
    async def check():
        hosted, models = models_of(monkeypatch, *({"model": one} for one in "abc"))
        await models.start()
        hosted[0].close_error = OSError("not closed")
        app = models.app()
        async with app.router.lifespan_context(app):
            pass
        assert [one.ended for one in hosted] == [["start", "close"]] * 3

    asyncio.run(check())


def test_health_and_figures_are_of_all_models(monkeypatch):
    async def check():
        hosted, models = models_of(
            monkeypatch, {"model": "a"}, {"model": "b"}, max_queued_bytes=MEGABYTE
        )
        hosted[1].may_start.set()
        await models.start()
        async with client_of(models.app()) as client:
            assert (await client.get("/health")).status_code == 200
            hosted[1].service.engine.is_running = False
            for path in ("/health", "/ping"):
                assert (await client.get(path)).status_code == 503
            body = {"model": "a", "prompt": "a" * 2 * MEGABYTE}
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            page = (await client.get("/metrics")).text
        assert {
            (one.labels["model_name"], one.labels["reason"]): one.value
            for family in text_string_to_metric_families(page)
            for one in family.samples
            if one.name == "jaxllm:admission_rejections_total" and one.value
        } == {("", "max_queued_bytes"): 1}

    asyncio.run(check())


def test_an_adapter_belongs_to_the_one_model_that_finds_it(monkeypatch, tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    for directory, name in zip((*places, *places), ("one", "other", "both", "both"), strict=True):
        (directory / name).mkdir(parents=True)
        (directory / name / "adapter_config.json").write_text("{}")
    (tmp_path / "link").symlink_to(places[0])
    entries = [
        {"model": place.name, "enable_lora": True, "lora_resolver_dirs": [str(place)]}
        for place in places
    ]

    async def check():
        hosted, models = models_of(monkeypatch, *entries)
        # The second model cannot be served yet.
        assert [models.named(one) for one in ("one", "other")] == hosted
        with pytest.raises(ValidationError, match="'both' is an adapter of several .*'a', 'b'"):
            models.named("both")

    asyncio.run(check())
    entries[1]["lora_resolver_dirs"] = [str(tmp_path / "link")]
    with pytest.raises(ValidationError, match="would both look up a name there"):
        read_models({"models": entries})


def test_an_adapter_of_a_users_resolver_belongs_to_the_model_of_the_resolver(monkeypatch):
    class Finds:
        """The adapters of a model, of which the user's resolver finds one."""

        def __init__(self, name):
            self.name, self.known = name, set()
            self.error = None

        def find(self, name):
            return name if name in self.known else None

        async def ask(self, name, timeout):
            if self.error is not None:
                raise self.error
            self.known |= {name} & {self.name}
            return name in self.known

    async def check():
        one = {"enable_lora": True, "lora_resolver": "module:Class"}
        hosted, models = models_of(monkeypatch, {"model": "a"} | one, {"model": "b"} | one)
        with pytest.raises(UnavailableError, match="'a' cannot be served yet"):
            await models.found("of b")
        for place in hosted:
            place.service = SimpleNamespace(
                served=SimpleNamespace(adapters=Finds(f"of {place.names[0]}")),
                options=SimpleNamespace(request_timeout=None),
            )
        assert [await models.found(name) for name in ("of b", "of a")] == hosted[::-1]
        with pytest.raises(NotFoundError, match="'of c' is not served here"):
            await models.found("of c")
        # A resolver that fails harms no adapter that another model has.
        for place in hosted:
            place.service.served.adapters.known.clear()
        hosted[0].service.served.adapters.error = UnavailableError("it cannot say")
        assert await models.found("of b") is hosted[1]
        with pytest.raises(UnavailableError, match="it cannot say"):
            await models.found("of c")

    asyncio.run(check())


def test_a_body_is_not_kept_while_its_request_is_answered(monkeypatch):
    async def check():
        (hosted, _), models = models_of(monkeypatch, {"model": "a"}, {"model": "b"})
        await models.start()
        held = []

        async def app(scope, receive, send):
            assert len((await receive())["body"]) > 8 * MEGABYTE
            # The thread that has read the name in it lets go of it a moment later.
            deadline = time.monotonic() + 120
            while tracemalloc.get_traced_memory()[0] > 4 * MEGABYTE:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0)
            held.append(tracemalloc.get_traced_memory()[0])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        async def parts():
            for _ in range(8):
                yield b" " * MEGABYTE
            yield b'{"model": "a"}'

        monkeypatch.setattr(hosted, "app", lambda endpoint: app)
        async with client_of(models.app()) as client:
            tracemalloc.start()
            headers = {"Content-Type": "application/json"}
            url = "/v1/completions"
            response = await client.post(url, content=parts(), headers=headers)
            tracemalloc.stop()
        assert response.status_code == 200
        assert held[0] < 4 * MEGABYTE

    asyncio.run(check())
