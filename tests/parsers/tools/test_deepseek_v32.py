import json

FORMAT = "deepseek_v32"


def tag(text):
    return f"<{text[: text[0] == '/']}｜DSML｜{text.removeprefix('/')}>"


def parameter(name, value, is_string):
    head = f'parameter name="{name}"' + ("" if is_string is None else f' string="{is_string}"')
    return f"{tag(head)}{value}{tag('/parameter')}\n"


def calls(*invokes):
    return f"{tag('function_calls')}\n{''.join(invokes)}{tag('/function_calls')}"


def invoke(name, *parameters):
    head = f'invoke name="{name}"'
    return f"{tag(head)}\n{''.join(parameters)}{tag('/invoke')}\n"


def test_the_tag_says_what_is_a_string(parse):
    parsed = parse(
        calls(
            invoke(
                "other",
                parameter("a", "7", "true"),
                parameter("b", "7", "false"),
                parameter("c", '{"x": [1, null]}', "false"),
                parameter("d", "true", "false"),
                parameter("e", "7", None),
            ),
            invoke("get_weather", parameter("days", "3", None)),
        )
    )

    (name, arguments), other = parsed.calls
    assert name == "other"
    assert json.loads(arguments) == {"a": "7", "b": 7, "c": {"x": [1, None]}, "d": True, "e": "7"}
    assert other == ("get_weather", '{"days": 3}')
    assert parsed.content == ""


def test_a_value_that_is_said_to_be_json_and_is_not_is_a_string(parse):
    ((_, arguments),) = parse(calls(invoke("f", parameter("a", "{no", "false")))).calls

    assert json.loads(arguments) == {"a": "{no"}
