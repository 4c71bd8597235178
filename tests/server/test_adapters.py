"""Adapters behind a server: requests name them as their model, and operators change which there
are."""

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from jaxllm import LLM, LoRARequest, SamplingParams, ValidationError
from jaxllm.lora.resolver import LoRAResolver
from jaxllm.openai.adapter_resolver import AdapterResolver, number_of
from jaxllm.openai.errors import UnavailableError
from jaxllm.openai.served_adapters import read_lora_modules
from jaxllm.openai.users_resolver import UsersResolver
from jaxllm.testing import make_tiny_adapter

ADMIN = {"Authorization": "Bearer of-admin"}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
BODY = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


class Library(LoRAResolver):
    """A user's resolver: adapters come from a place far away."""

    def __init__(self):
        self.has = {}  # paths, and what else it says of a name
        self.asked = []
        self.answers = None  # an event to wait for before it answers

    async def resolve_lora(self, base_model_name, lora_name):
        self.asked.append((base_model_name, lora_name))
        if self.answers is not None:
            await self.answers.wait()
        else:
            await asyncio.sleep(0)
        path = self.has.get(lora_name)
        if isinstance(path, Exception):
            raise path
        # The number of every adapter is the same: servers choose their own.
        return path if path is None or path == 7 else LoRARequest(lora_name, 1, path)


LIBRARY = Library()


@pytest.fixture(scope="module")
def files(engine_options, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "poems"), 1):
        make_tiny_adapter(path / name, engine_options["model"], seed=seed)
    (path / "found").mkdir()
    return path


@pytest.fixture(scope="module")
def expected(engine_options, files):
    """The text of each adapter, and of the model alone."""
    llm = LLM(**engine_options | LORA)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    adapters = {None: None} | {
        name: LoRARequest(name, 1, files / name) for name in ("sql", "poems")
    }
    return {
        name: llm.generate("Once", params, lora_request=lora, use_tqdm=False)[0].outputs[0].text
        for name, lora in adapters.items()
    }


@pytest.fixture(scope="module")
def server(host_with_adapters, files):
    with host_with_adapters.serve(
        admin_keys=("of-admin",),
        lora_modules=(f"sql={files / 'sql'}",),
        lora_dirs=(str(files),),
        lora_resolver_dirs=(str(files / "found"),),
    ) as client:
        yield client


def complete(server, model, **more):
    return server.post("/v1/completions", json=BODY | {"model": model} | more)


def load(server, name, path, **more):
    body = {"lora_name": name, "lora_path": str(path)} | more
    return server.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(server, name):
    return server.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def models(server):
    return {one["id"]: one for one in server.get("/v1/models").json()["data"]}


@pytest.mark.slow
def test_a_request_names_an_adapter_as_its_model(server, expected):
    answer = complete(server, "sql").json()
    assert answer["model"] == "sql"
    assert answer["choices"][0]["text"] == expected["sql"]
    assert complete(server, "tiny").json()["choices"][0]["text"] == expected[None]
    streamed = complete(server, "sql", stream=True).text
    assert '"model":"sql"' in streamed and '"model":"tiny"' not in streamed
    missing = complete(server, "poems")
    assert missing.status_code == 404
    assert "'tiny', 'alias', 'sql'" in missing.json()["error"]["message"]


@pytest.mark.slow
def test_models_are_listed_with_their_parents(server, files, engine_options):
    listed = models(server)
    assert list(listed) == ["tiny", "alias", "sql"]
    assert listed["sql"]["parent"] == "tiny" and listed["sql"]["root"] == str(files / "sql")
    assert listed["tiny"]["parent"] is None
    assert listed["tiny"]["root"] == engine_options["model"]
    assert server.get("/v1/models/sql").json() == listed["sql"]


@pytest.mark.slow
def test_operators_load_and_unload_adapters(server, files, expected):
    loaded = load(server, "poet", files / "poems")
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'poet' added successfully."
    assert complete(server, "poet").json()["choices"][0]["text"] == expected["poems"]
    assert "poet" in models(server)
    again = load(server, "poet", files / "sql")
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    assert load(server, "poet", files / "sql", load_inplace=True).status_code == 200
    assert complete(server, "poet").json()["choices"][0]["text"] == expected["sql"]
    assert unload(server, "poet").text == "Success: LoRA adapter 'poet' removed successfully."
    assert complete(server, "poet").status_code == 404
    assert unload(server, "poet").status_code == 404


@pytest.mark.slow
def test_paths_are_below_an_allowed_directory(server, files, engine_options, tmp_path):
    shutil.copytree(files / "sql", tmp_path / "sql")
    (files / "link").symlink_to(tmp_path / "sql")
    for path in (tmp_path / "sql", files / ".." / "x", files / "link", "/etc"):
        refused = load(server, "other", path)
        assert refused.status_code == 400
        assert "--lora-dirs" in refused.json()["error"]["message"]
    assert load(server, "other", files / "none").status_code == 400
    assert load(server, "tiny", files / "sql").status_code == 400
    assert "other" not in models(server)
    assert server.post("/v1/load_lora_adapter", json={}).status_code == 401
    wrong = server.post("/v1/load_lora_adapter", json={"lora_nam": "x"}, headers=ADMIN)
    assert wrong.status_code == 400 and "lora_nam" in wrong.json()["error"]["message"]


@pytest.mark.slow
def test_a_wrong_adapter_is_refused_by_its_field(server, files, engine_options):
    make_tiny_adapter(files / "large", engine_options["model"], rank=9)
    refused = load(server, "large", files / "large")
    assert refused.status_code == 400
    assert "max_lora_rank=8" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_a_name_that_is_unknown_is_looked_up_in_a_directory(server, files, expected):
    assert complete(server, "verses").status_code == 404
    shutil.copytree(files / "poems", files / "found" / "verses")
    answer = complete(server, "verses").json()
    assert answer["model"] == "verses"
    assert answer["choices"][0]["text"] == expected["poems"]
    assert server.get("/v1/models/verses").json()["parent"] == "tiny"
    assert unload(server, "verses").status_code == 404  # nobody has loaded it
    shutil.rmtree(files / "found" / "verses")
    assert complete(server, "verses").status_code == 404


@pytest.mark.slow
def test_a_name_that_is_unknown_is_looked_up_by_the_resolver_of_a_user(
    host_with_adapters, files, expected, monkeypatch
):
    monkeypatch.setattr(LIBRARY, "asked", asked := [])
    monkeypatch.setattr(LIBRARY, "has", has := {})
    has |= {"far": files / "far", "verse": files / "poems", "bad": RuntimeError("of the user")}
    has |= {"gone": files / "none", "odd": 7, "long" * 200: files / "sql"}
    shutil.copytree(files / "sql", files / "far")
    with host_with_adapters.serve(
        admin_keys=("of-admin",), lora_resolver="tests.server.test_adapters:LIBRARY"
    ) as server:
        with ThreadPoolExecutor(4) as threads:
            names = ("far", "verse", "far", "far")
            answers = [one.json() for one in threads.map(partial(complete, server), names)]
        for answer, name, same in zip(answers, names, ("sql", "poems", "sql", "sql"), strict=True):
            assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[same])
        assert sorted(asked) == [("tiny", "far"), ("tiny", "verse")]

        # Every endpoint that has a model in its body, or in its path, knows it.
        asked.clear()
        assert unload(server, "far").status_code == 200
        assert server.get("/v1/models/far").json()["parent"] == "tiny"
        assert unload(server, "far").status_code == 200
        tokens = server.post("/tokenize", json={"model": "far", "prompt": "Once"})
        assert tokens.status_code == 200
        assert asked == [("tiny", "far")] * 2
        assert "far" not in models(server)

        # Files that are gone are asked for again; what it does not know is not served.
        asked.clear()
        shutil.rmtree(files / "far")
        has["far"] = files / "poems"
        assert complete(server, "far").json()["choices"][0]["text"] == expected["poems"]
        assert complete(server, "none").status_code == 404
        assert complete(server, "none").status_code == 404
        assert asked == [("tiny", "far"), ("tiny", "none"), ("tiny", "none")]
        assert complete(server, "long" * 200).status_code == 404
        for name in ("bad", "gone", "odd"):
            failed = complete(server, name)
            assert failed.status_code == 503, name
            assert "could not be looked up" in failed.json()["error"]["message"]
        assert complete(server, "tiny").json()["choices"][0]["text"] == expected[None]


def test_requests_wait_together_and_each_as_long_as_it_may(tmp_path):
    (tmp_path / "adapter_config.json").touch()

    async def check():
        library = Library()
        library.has, library.answers = {"far": tmp_path}, asyncio.Event()
        resolver = UsersResolver(library, "tiny")
        with pytest.raises(UnavailableError, match="model='far': it is still being looked up"):
            await resolver.ask("far", 0.01)
        gone, *others = [asyncio.create_task(resolver.ask(one)) for one in ("far", "far", "none")]
        await asyncio.sleep(0.01)
        gone.cancel()  # its client has gone
        library.answers.set()
        assert await asyncio.gather(*others) == [True, False]
        assert library.asked == [("tiny", "far"), ("tiny", "none")]
        found = resolver.found("far")
        assert found is not None and found.lora_path == str(tmp_path)
        # Processes give an adapter the same number, which is not that of another one.
        assert found.lora_int_id == number_of("far") != number_of("none")
        assert resolver.under_way == ()

    asyncio.run(check())


def test_the_resolver_of_a_user_is_made_at_the_start():
    assert UsersResolver.load("tests.server.test_adapters:Library", "tiny").found("any") is None
    for spec, why in {
        "plain": "write it as 'module:Class'",
        "no.such:Thing": "it cannot be made .ModuleNotFoundError",
        "tests.server.test_adapters:BODY": "an async resolve_lora",
        "jaxllm.lora.resolver:LoRAResolver": "it cannot be made .TypeError",
    }.items():
        with pytest.raises(ValidationError, match=f"lora_resolver='{spec}'.*{why}"):
            UsersResolver.load(spec, "tiny")


def test_names_do_not_lead_out_of_the_directories_of_a_resolver(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for path in (inside / "good", inside / ".hidden", inside / "two" / "deep", outside):
        path.mkdir(parents=True)
        (path / "adapter_config.json").touch()
    (inside / "link").symlink_to(outside)
    (inside / "alias").symlink_to(inside / "good")
    resolver = AdapterResolver([str(inside)])
    found, alias = resolver.resolve("good"), resolver.resolve("alias")
    assert found is not None and alias is not None
    assert found.lora_path == alias.lora_path == str(inside / "good")
    assert found.lora_int_id != alias.lora_int_id
    names = ["../outside", "two/deep", "two", "link", ".hidden", ".", "..", "", str(outside)]
    for name in [*names, "good/", "good\0", "good\n", "none", "a" * 5000]:
        assert resolver.resolve(name) is None, name
    assert AdapterResolver().resolve("good") is None
    with pytest.raises(ValidationError, match="lora_resolver_dirs=.*no such directory"):
        AdapterResolver([str(tmp_path / "none")])


@pytest.mark.slow
def test_metrics_tell_how_many_adapters_there_may_be(server):
    assert 'max_lora="2"' in server.get("/metrics").text


def test_modules_are_names_and_paths_or_objects():
    plain, full = read_lora_modules(
        ["a=/x/y=z", '{"name": "b", "path": "/p", "base_model_name": "base"}']
    )
    assert (plain.lora_name, plain.lora_path, plain.lora_int_id) == ("a", "/x/y=z", 1)
    assert (full.lora_name, full.base_model_name, full.lora_int_id) == ("b", "base", 2)


@pytest.mark.parametrize(
    "modules",
    [["a"], ["=x"], ["a="], ["{"], ['{"name": "a"}'], ['{"name": 3, "path": "x"}'], ["a=1", "a=2"]],
)
def test_other_modules_are_refused(modules):
    with pytest.raises(ValidationError, match="lora_modules="):
        read_lora_modules(modules)
