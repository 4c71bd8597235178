"""On a TPU VM, called by profile.sh: trace an engine while it works on random prompts.

    python profile.py --trace-dir DIR --model MODEL -tp 8

The same prompts run twice. The second run is traced, because then everything is compiled and warm.
"""

import random
import sys

from jaxllm.cli.arguments import CommandParser, add_engine_arguments, engine_options_from
from jaxllm.errors import JaxLLMError


def main() -> None:
    parser = CommandParser("profile.py", "Trace an engine while it works on random prompts.")
    parser.add_argument("--trace-dir", required=True, metavar="DIR", help="Where the trace goes.")
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N", help="Default: 64.")
    parser.add_argument("--prompt-len", type=int, default=512, metavar="N", help="Default: 512.")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="Default: 32.")
    add_engine_arguments(parser)
    args = parser.parse(sys.argv[1:])
    options = {"enable_prefix_caching": False, **engine_options_from(args)}

    import jax

    from jaxllm import LLM, SamplingParams

    llm = LLM(**options, skip_tokenizer_init=True)
    rng = random.Random(0)
    # Every vocabulary has these ids.
    prompts = [
        [rng.randrange(100) for _ in range(args.prompt_len)] for _ in range(args.num_prompts)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False
    )
    llm.generate(prompts, params)
    with jax.profiler.trace(args.trace_dir):
        llm.generate(prompts, params)


if __name__ == "__main__":
    try:
        main()
    except JaxLLMError as error:
        sys.exit(f"profile.py: error: {error}")
