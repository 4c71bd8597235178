"""A real browser, with tabs that record all errors."""

import contextlib
import os
import shutil
import warnings

import pytest

from jaxllm.testing import make_tiny_checkpoint

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAX_MODEL_LEN = 16384
TIMEOUT_MS = 300_000
HOW = f"none of {', '.join(BROWSERS)} is installed; try: apt-get install chromium"


@pytest.fixture(scope="session")
def host(engine_options, new_host, tmp_path_factory):
    """An engine with answers so long that even a slow browser can stop them."""
    model = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_MODEL_LEN
    )
    host = new_host(engine_options | {"model": str(model), "max_model_len": MAX_MODEL_LEN})
    yield host
    host.close()


@pytest.fixture(scope="session")
def client(host):
    with host.serve(access_log=False) as client:
        yield client


@pytest.fixture(scope="module")  # not longer, because an event loop runs in this thread meanwhile
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        warnings.warn(f"the page is not tested: {HOW}", stacklevel=1)
        pytest.skip(HOW)
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect.set_options(timeout=TIMEOUT_MS)
    # Chromium's sandbox does not work as root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """A function that opens a server's page in a new tab and waits until it is ready.

    At the end it checks that the console has only expected messages (the browser also reports
    policy violations there), and that there were no requests to other hosts.
    """
    with contextlib.ExitStack() as stack:

        def open_page(server, *, path="/", waits_for="#model option", expected="", **options):
            context = browser.new_context(**options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(TIMEOUT_MS)
            complaints, requests = [], []
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(f"{server.base_url}{path}")
            page.wait_for_selector(waits_for, state="attached")

            def check():
                assert [text for text in complaints if not expected or expected not in text] == []
                assert [url for url in requests if not url.startswith(str(server.base_url))] == []

            stack.callback(check)
            return page

        yield open_page
