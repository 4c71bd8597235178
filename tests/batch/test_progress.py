"""What a batch says of itself."""

import re

from jaxllm.batch.progress import Progress


def test_it_tells_what_is_done_and_what_the_rest_will_cost():
    progress = Progress(10**12, price_per_hour=7.2)
    progress.skip(500)
    progress.start()
    progress.answer(100, prompt_tokens=3, generated_tokens=4)
    progress.error(100)
    assert re.fullmatch(
        r"1 answer, 1 error, in \d+ tok/s, out \d+ tok/s, 0:00:00, \d+:\d\d:\d\d left, "
        r"\$0\.00 of \$\d+\.\d\d",
        progress.summary(),
    )


def test_at_the_end_nothing_is_left():
    progress = Progress(600, price_per_hour=None)
    progress.skip(500)
    progress.start()
    progress.answer(100, prompt_tokens=3, generated_tokens=4)
    summary = progress.summary()
    assert summary.startswith("1 answer, 0 errors, in ")
    assert summary.endswith(" tok/s, 0:00:00")
