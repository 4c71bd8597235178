"""The page in a real browser, in front of a real engine."""

import base64
import contextlib
import json
import threading

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CHAT = "**/v1/chat/completions"
HACK = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script><b>bold</b>'
LONG = {"max_tokens": 16000, "ignore_eos": True}
DOT = base64.b64decode("R0lGODlhAQABAIAAAP///wAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw==")
# Paste or drop an image; whoever drops it drops a text file, too.
BRING = """([event, target, image]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(image), (one) => one.charCodeAt(0));
  data.items.add(new File([bytes], "dot.gif", { type: "image/gif" }));
  if (event === "drop") data.items.add(new File(["a"], "notes.txt", { type: "text/plain" }));
  const init = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
  const kind = event === "drop" ? DragEvent : ClipboardEvent;
  document.querySelector(target).dispatchEvent(new kind(event, init));
}"""


@pytest.fixture(autouse=True)
def quiet_engine(browser, host):  # without a browser no engine is started
    host.wait_until_idle()
    yield
    host.wait_until_idle()


def expect(page, selector):
    from playwright.sync_api import expect

    return expect(page.locator(selector))


def choose(page, **settings):
    """Fill in the sampling controls."""
    page.evaluate("document.getElementById('settings').open = true")
    for name, value in settings.items():
        page.fill(f"[name={name}]", str(value))


def say(page, text):
    page.fill("#message", text)
    page.press("#message", "Enter")


def shown_answer(page, place=0):
    """The text of an answer that has ended."""
    answer = page.locator(".answer[aria-busy=false]").nth(place)
    answer.wait_for()
    return answer.locator(".content").text_content()


def answer_of(client, *messages, **settings):
    roles = ("user", "assistant")
    body = {
        "messages": [
            {"role": roles[place % 2], "content": text} for place, text in enumerate(messages)
        ]
    }
    response = client.post("/v1/chat/completions", json=body | settings).json()
    return response["choices"][0]["message"]["content"]


def ask_for_more(page, **fields):
    """Add fields to what the page asks for; returns the list of all that it asks."""
    asked = []

    def go_on(route):
        body = route.request.post_data_json
        asked.append(body)
        route.continue_(post_data=json.dumps(body | fields))

    page.route(CHAT, go_on)
    return asked


def when_text_comes(page, button):
    """Press a button as soon as there is something of the last answer."""
    page.evaluate(
        """(button) => new MutationObserver((changes, observer) => {
          if (!document.querySelector(".answer:last-child .content")?.textContent) return;
          observer.disconnect();
          document.getElementById(button).click();
        }).observe(document.getElementById("log"), { subtree: true, childList: true,
                                                     characterData: true })""",
        button,
    )


def fulfill_with(page, *deltas):
    """Let the server answer with these deltas; returns the list of all that is asked."""
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    asked = []

    def fulfill(route):
        asked.append(route.request.post_data_json)
        body = "".join([*lines, "data: [DONE]\n\n"])
        route.fulfill(content_type="text/event-stream", body=body)

    page.route(CHAT, fulfill)
    return asked


def test_a_seeded_conversation_is_what_the_api_answers(client, open_page):
    settings = {"temperature": 0.8, "top_k": 50, "seed": 7, "max_tokens": 40}
    page = open_page(client)
    assert page.locator("#model option").all_text_contents() == ["tiny", "alias"]
    choose(page, **settings)
    say(page, "Hello")
    first = shown_answer(page)
    assert first == answer_of(client, "Hello", **settings) != ""
    say(page, "And then?")
    assert shown_answer(page, 1) == answer_of(client, "Hello", first, "And then?", **settings)
    expect(page, ".answer footer >> nth=0").to_contain_text("tokens")
    expect(page, "#message").to_be_focused()


def test_every_control_reaches_the_request(client, open_page):
    page = open_page(client)
    settings = {
        "temperature": 0.5, "max_tokens": 3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
    }  # fmt: skip
    asked = ask_for_more(page)
    choose(page, **settings)
    page.fill("#system", "Be brief.")
    page.select_option("#model", "alias")
    say(page, "Hello")
    shown_answer(page)
    (body,) = asked
    assert body.items() >= (settings | {"model": "alias"}).items()
    system, user = body["messages"]
    assert (system["content"], user["content"]) == ("Be brief.", "Hello")


def test_tools_are_offered_and_their_calls_stay_in_the_conversation(host, open_page):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with host.serve(access_log=False, **flags) as server:
        page = open_page(server)
        choose(page, max_tokens=4)
        page.fill("#tools", json.dumps([tool]))
        fulfill_with(page, {"tool_calls": [call | {"index": 0}]})
        say(page, "Hello")
        assert shown_answer(page) == ""
        page.unroute(CHAT)
        asked = ask_for_more(page)
        say(page, "Go on")
        assert shown_answer(page, 1)
    assert asked[0]["tools"] == [tool]
    answer, result = asked[0]["messages"][1:]
    assert answer == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert result == {"role": "tool", "tool_call_id": "a", "content": "Go on"}


@pytest.mark.parametrize("how", ["stop", "reset"])
def test_leaving_an_answer_ends_it_on_the_server(host, client, open_page, how):
    before = host.wait_until_idle().num_generation_tokens
    page = open_page(client)
    asked = ask_for_more(page, **LONG)
    when_text_comes(page, how)
    say(page, "Hello")
    expect(page, "#send").to_be_visible()
    stats = host.wait_until_idle()
    assert stats.num_blocks_used == 0
    assert stats.num_generation_tokens - before < LONG["max_tokens"]
    assert len(asked) == 1


def test_what_came_before_stop_stays_in_the_conversation(client, open_page):
    page = open_page(client)
    asked = ask_for_more(page, **LONG)
    when_text_comes(page, "stop")
    say(page, "Hello")
    text = shown_answer(page)
    expect(page, ".answer footer").to_contain_text("stopped")
    when_text_comes(page, "stop")
    say(page, "Go on")
    shown_answer(page, 1)
    assert [message["content"] for message in asked[1]["messages"]] == ["Hello", text, "Go on"]


def test_reset_forgets_the_conversation(client, open_page):
    page = open_page(client)
    choose(page, seed=1, max_tokens=8)
    say(page, "Hello")
    first = shown_answer(page)
    page.click("#reset")
    expect(page, "#greeting").to_be_visible()
    expect(page, ".answer").to_have_count(0)
    say(page, "Hello")
    assert shown_answer(page) == first


def test_enter_sends_and_shift_enter_does_not(client, open_page):
    page = open_page(client)
    choose(page, max_tokens=2)
    page.focus("#message")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    shown_answer(page)
    assert page.locator(".said .text").text_content() == "one\ntwo"


def test_a_key_is_asked_for_and_a_wrong_one_is_told(host, open_page):
    with host.serve(keys=("the-right-one",), access_log=False) as server:
        page = open_page(server, waits_for="#key-form:not([hidden])", expected="401")
        expect(page, "#key-error").to_be_hidden()
        page.fill("#key", "a-wrong-one")
        page.press("#key", "Enter")
        expect(page, "#key-error").to_have_text("The server does not know this key.")
        page.fill("#key", "the-right-one")
        page.press("#key", "Enter")
        expect(page, "#key-form").to_be_hidden()
        expect(page, ".figure >> nth=0").to_contain_text("0 running")
        choose(page, max_tokens=2)
        say(page, "Hello")
        assert shown_answer(page)
        kept = "[localStorage.length, document.cookie, sessionStorage.length]"
        assert page.evaluate(kept) == [0, "", 1]


def test_an_error_is_shown_and_the_message_is_not_lost(client, open_page):
    page = open_page(client, expected="400")
    choose(page, max_tokens=2)
    too_long = "word" * 16000
    say(page, too_long)
    expect(page, "#log [role=alert]").to_contain_text("max_model_len")
    expect(page, "#message").to_have_value(too_long)
    expect(page, ".said").to_have_count(0)
    say(page, "Hello")
    shown_answer(page)


def test_images_are_pasted_dropped_or_chosen_and_sent(client, open_page):
    page = open_page(client)
    asked = fulfill_with(page, {"content": "A dot."})
    file = {"name": "a.gif", "mimeType": "image/gif", "buffer": DOT}
    page.set_input_files("#image-files", [file, file])
    expect(page, "#images img").to_have_count(2)
    for place, (event, target) in enumerate([("paste", "#message"), ("drop", "main")]):
        page.evaluate(BRING, [event, target, base64.b64encode(DOT).decode()])
        expect(page, "#images img").to_have_count(place + 3)
    expect(page, "#log [role=alert]").to_have_text("notes.txt is no image.")
    page.click("#images button >> nth=1")
    page.click("#images button >> nth=0")
    expect(page, "#images img").to_have_count(2)
    say(page, "What is this?")
    assert shown_answer(page) == "A dot."
    expect(page, "#images img").to_have_count(0)
    expect(page, ".said img").to_have_count(2)
    # The browser shows it: nothing forbids it.
    page.wait_for_function("document.querySelector('.said img').naturalWidth === 1")
    say(page, "And now?")
    shown_answer(page, 1)
    url = f"data:image/gif;base64,{base64.b64encode(DOT).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    first, _, second = asked[-1]["messages"]
    assert first["content"] == [image, image, {"type": "text", "text": "What is this?"}]
    assert second["content"] == "And now?"


def test_a_message_waits_for_its_image(client, open_page):
    """Which is still being read when it is sent."""
    page = open_page(client)
    asked = fulfill_with(page, {"content": "A dot."})
    page.fill("#message", "Hello")
    page.evaluate(
        """(args) => {
          const read = FileReader.prototype.readAsDataURL;
          FileReader.prototype.readAsDataURL = function (file) {
            setTimeout(() => read.call(this, file), 300);
          };
          (BRING)(args);
          document.getElementById("send").click();
        }""".replace("BRING", BRING),
        ["paste", "#message", base64.b64encode(DOT).decode()],
    )
    assert shown_answer(page) == "A dot."
    assert [part["type"] for part in asked[0]["messages"][0]["content"]] == ["image_url", "text"]


def test_an_image_that_the_model_cannot_see_is_not_lost(client, open_page):
    page = open_page(client, expected="400")
    page.set_input_files("#image-files", {"name": "a.gif", "mimeType": "image/gif", "buffer": DOT})
    expect(page, "#images img").to_have_count(1)
    page.press("#message", "Enter")
    expect(page, "#log [role=alert]").to_contain_text("image")
    expect(page, "#images img").to_have_count(1)
    expect(page, ".said").to_have_count(0)


def test_a_setting_that_cannot_be_is_not_sent(client, open_page):
    page = open_page(client)
    asked = ask_for_more(page)
    choose(page, top_p=2)
    say(page, "Hello")
    expect(page, "#log [role=alert]").to_contain_text("top_p")
    page.fill("[name=top_p]", "")
    page.fill("#tools", "nonsense")
    page.press("#message", "Enter")
    expect(page, "#log [role=alert] >> nth=1").to_contain_text("tools: this is not a JSON list")
    assert asked == []


def test_reasoning_is_shown_apart(host, open_page):
    with host.serve(reasoning_parser="deepseek_r1", access_log=False) as server:
        page = open_page(server)
        choose(page, seed=1, max_tokens=8)
        say(page, "Hello")
        assert shown_answer(page) == ""  # noise does not end the reasoning
        body = {"messages": [{"role": "user", "content": "Hello"}], "seed": 1, "max_tokens": 8}
        answer = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        shown = page.locator(".reasoning .text").text_content()
        assert shown == answer["reasoning"] != ""


def test_what_the_model_writes_is_text_and_nothing_else(client, open_page):
    page = open_page(client)
    call = {"index": 0, "id": "a", "function": {"name": HACK, "arguments": HACK}}
    fulfill_with(
        page,
        {"reasoning": HACK},
        {"content": HACK[:9]},
        {"content": HACK[9:]},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " and more"}}]},
    )
    say(page, HACK)
    assert shown_answer(page) == HACK
    assert page.locator(".said .text").text_content() == HACK
    assert page.locator(".reasoning .text").text_content() == HACK
    assert page.locator(".call code").text_content() == HACK
    assert page.locator(".call pre").text_content() == f"{HACK} and more"
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_code_is_in_blocks_and_every_character_is_shown(client, open_page):
    page = open_page(client)
    text = "So:\n\n```python\nprint('``')\n  ```\nand `this`:\n``\n```\nno end``"
    fulfill_with(page, *({"content": character} for character in text))
    say(page, "Hello")
    assert shown_answer(page) == text
    blocks = page.locator(".answer .content > *").all_text_contents()
    assert blocks == [
        "So:\n\n",
        "```python\nprint('``')\n  ```\n",
        "and `this`:\n``\n",
        "```\nno end``",
    ]
    assert page.locator(".answer code").all_text_contents()[:2] == [blocks[1], blocks[3]]


def test_the_browser_would_refuse_what_scripts_make_of_text(client, open_page):
    page = open_page(client, expected="TrustedHTML")
    refused = """(html) => {
      try { document.body.innerHTML = html; } catch (error) { return error.name; }
    }"""
    assert page.evaluate(refused, HACK) == "TypeError"
    assert page.evaluate("window.hacked") is None


@contextlib.contextmanager
def something_to_do(client):
    """Requests, one after the other, within this context."""
    is_over = threading.Event()

    def work():
        while not is_over.is_set():
            body = {"prompt": "Once upon a time there was a house", "ignore_eos": True}
            client.post("/v1/completions", json=body | {"max_tokens": 300})

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("prefix", ["jaxllm", "vllm"])
def test_pictures_move_while_something_runs(host, open_page, prefix):
    with host.serve(metrics_prefix=prefix, access_log=False) as server:
        page = open_page(server)
        requests, rates, kv_use, step_time, hits = page.locator(".figure").all()
        requests.get_by_text("0 running").wait_for()
        with something_to_do(server):
            requests.get_by_text("1 running").wait_for()
            for figure, unit in [(rates, "out"), (kv_use, "%"), (step_time, "ms"), (hits, "%")]:
                figure.locator("output", has_text=unit).wait_for()
                assert figure.locator("path.area").get_attribute("d").startswith("M")
            assert "Tokens per second" in rates.get_by_role("img").get_attribute("aria-label")
        requests.get_by_text("0 running").wait_for()


def test_a_hidden_tab_asks_nothing(client, open_page):
    page = open_page(client)
    polls = []
    page.on("request", lambda request: polls.append(request) if "metrics" in request.url else None)
    show = """(isHidden) => {
      Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with page.expect_request("**/metrics"):
        pass
    page.evaluate(show, True)
    polls.clear()
    page.wait_for_timeout(2500)
    assert polls == []
    with page.expect_request("**/metrics"):
        page.evaluate(show, False)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(client, open_page, width):
    page = open_page(client, viewport={"width": width, "height": 700})
    choose(page, max_tokens=20)
    say(page, "long" * 200)
    shown_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#engine summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_narrow_screen_has_the_conversation_first(client, open_page):
    page = open_page(client, viewport={"width": 1280, "height": 800})
    expect(page, "#figures").to_be_visible()
    page.set_viewport_size({"width": 360, "height": 800})
    expect(page, "#figures").to_be_hidden()
    page.locator("#engine summary").click()
    expect(page, "#figures").to_be_visible()
    # They leave more than half of the screen to the conversation.
    assert page.locator("main").bounding_box()["height"] > 400
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(page, "#figures").to_be_visible()


def test_one_value_alone_is_a_line(client, open_page):
    page = open_page(client)
    drawn = page.evaluate("""async () => {
      const { Chart } = await import("./page/chart.js");
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      new Chart(svg, 1).draw([[5]], 10);
      return svg.querySelector(".line").getAttribute("d");
    }""")
    places = [float(point.split()[0]) for point in drawn.removeprefix("M").split("L")]
    assert len(places) == 2 and places[1] - places[0] > 5


def test_the_endpoints_are_listed_for_who_has_the_key(host, open_page):
    with host.serve(keys=("secret",), access_log=False) as client:
        page = open_page(client, path="/docs", waits_for="#key-form:not([hidden])", expected="401")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        chat = page.locator("details", has_text="The next message of a conversation")
        expect(page, "#paths details >> nth=0").to_be_visible()
        chat.locator("summary").click()
        chat.get_by_role("link", name="ChatRequest").click()
        request = page.locator("#type-ChatRequest")
        request.get_by_text("messages", exact=True).wait_for()
        assert "list of string or string" in request.inner_text()  # of stop
