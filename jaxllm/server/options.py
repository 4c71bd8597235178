"""What is asked of the server, beside the engine. Flags are generated from the fields."""

import math
from dataclasses import dataclass

from jaxllm.config import option
from jaxllm.errors import ValidationError, refused
from jaxllm.openai.responses.store import IN_MEMORY
from jaxllm.parsers.options import ParserOptions


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ParserOptions):
    """Server"""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 lets other machines in.")
    port: int = option(8000, "Port to listen at; 0 takes any that is free.")
    api_server_count: int = option(
        1,
        "Processes that speak HTTP and handle text, in front of the one engine. Each has a "
        "tokenizer of its own; limits hold for all of them together.",
    )
    served_model_name: tuple[str, ...] = option(
        (), 'What "model" in a request may be; answers carry the first one (default: --model).'
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "Adapters, each name=path or a JSON object of name, path and base_model_name: a request "
        'names one as its "model". Needs --enable-lora.',
    )
    lora_dirs: tuple[str, ...] = option(
        (),
        "Directories below which an operator may load further adapters from while the server runs, "
        "at /v1/load_lora_adapter.",
    )
    lora_resolver_dirs: tuple[str, ...] = option(
        (),
        "Directories in which an unknown name of a model is looked up: a folder of this name is "
        "an adapter. Whoever may send requests may use all adapters there. Needs --enable-lora.",
    )
    lora_resolver: str | None = option(
        None,
        "Your 'module:Class', a jaxllm.lora.resolver.LoRAResolver: it is asked for an adapter that "
        "a request names and nobody has loaded, and runs the code of that module. Needs "
        "--enable-lora.",
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys, one of which every request must bring (but to /health, /ping, /ready and the page).",
    )
    api_key_file: str | None = option(
        None, "File with such keys, one on each line; unlike flags, nobody sees them in `ps`."
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "Keys that open the admin endpoints, such as /sleep and /server_info, and nothing else. "
        "Without such a key there are none of these endpoints; with one, /openapi.json lists them.",
    )
    admin_api_key_file: str | None = option(None, "File with such keys, one on each line.")
    admin_without_key: bool = option(
        False, "Offer the admin endpoints to everybody who may use the server."
    )
    ssl_certfile: str | None = option(None, "Certificate; with it the server speaks HTTPS only.")
    ssl_keyfile: str | None = option(None, "Private key of --ssl-certfile.")
    ssl_ca_certs: str | None = option(
        None, "Authorities, a certificate of one of which every client must then bring."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names by which the server may be called (the Host header); '*.example.org' means all "
        "below, '*' all. By default a server at a loopback address has local names only, so that "
        "no web page reaches it by a name of its own, and any other has all.",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Web origins whose pages may call the server (CORS); '*' means all."
    )
    allowed_methods: tuple[str, ...] = option(("GET", "POST"), "Methods they may use.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers they may send.")
    # Requests.
    chat_template: str | None = option(
        None, "File of a Jinja template in place of the tokenizer's own."
    )
    trust_request_chat_template: bool = option(
        False, "Let a request bring a chat template, which is a program that this machine runs."
    )
    chat_template_timeout: float = option(
        10.0, "Seconds that a chat template may take for one request."
    )
    response_store: str | None = option(
        None,
        "Where /v1/responses keeps its answers, so that a request may go on after one: a file "
        "(SQLite), or 'memory'. By default nothing is kept.",
    )
    response_store_bytes: int = option(
        256 << 20, "Most bytes of kept responses; those used longest ago go first."
    )
    batch_dir: str | None = option(
        None,
        "Directory in which /v1/files and /v1/batches keep files, answers and the journals by "
        "which an unfinished batch goes on after a restart. By default nothing is kept.",
    )
    batch_dir_bytes: int = option(
        16 << 30, "Most bytes of all files; above it, uploads are refused."
    )
    max_batch_file_bytes: int = option(200 << 20, "Longest file that may be uploaded.")
    max_batch_lines: int = option(50_000, "Most requests in one batch.")
    max_batches: int = option(64, "Most unfinished batches of one API key.")
    max_batch_requests: int | None = option(
        None,
        "Most lines of batches that are in the engine at once. Default: --max-num-seqs; fewer "
        "leave places to other requests.",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Offer /tokenizer_info: how the tokenizer is configured, and its chat template."
    )
    # Limits.
    max_body_bytes: int | None = option(
        None,
        "Longest body of a request. Default: 4 MiB, and 64 bytes for each token of max_model_len, "
        "so that the longest prompt fits with every character escaped.",
    )
    max_tokenize_tokens: int | None = option(
        None,
        "Most tokens that /tokenize and /detokenize take in one request. Default: four times "
        "max_model_len, and at least 65536.",
    )
    max_header_bytes: int = option(64 << 10, "Longest head of a request, with its URL.")
    max_json_depth: int = option(64, "Deepest nesting of a body.")
    max_queued_requests: int | None = option(
        16384,
        "Most answers that may be under way beside the --max-num-seqs that run at once; what comes "
        "above it is refused with status 503.",
    )
    max_queued_tokens: int | None = option(
        None, "Most tokens of all prompts under way; the same above it."
    )
    max_queued_bytes: int = option(
        1 << 30, "Most bytes of all bodies under way; the same above it."
    )
    max_request_logprobs: int = option(
        1 << 24,
        "Most logprobs that one request may ask for, at all positions of all its answers and "
        "prompts together; prompts count as often as the answer shows them, with one for each "
        "token at least.",
    )
    request_timeout: float | None = option(
        None,
        "Seconds after which an answer ends as it is, with finish_reason 'abort' and stop_reason "
        "'timeout'. --lora-resolver has as long to find an adapter (by default 600), before the "
        "request is refused.",
    )
    client_timeout: float = option(
        60.0,
        "Seconds that a client has to send its headers, to send its body, or to take the next "
        "piece of an answer.",
    )
    sse_keep_alive_interval: float = option(
        0.0,
        "Seconds without news after which a stream sends a comment, so that no proxy takes it for "
        "dead; 0 is never.",
    )
    shutdown_timeout: float = option(
        30.0, "Seconds after SIGTERM in which requests under way may finish."
    )
    # Reports.
    metrics_prefix: str = option("jaxllm", "Of the names in /metrics; 'vllm' fits its dashboards.")
    metrics_without_key: bool = option(
        False, "Let everybody read /metrics, as a gateway or a scraper that has no key does."
    )
    disable_log_stats: bool = option(False, "Do not log the state of the engine every 10 seconds.")
    disable_page: bool = option(
        False, "Show no page at / to talk to the model and to watch the engine."
    )
    access_log: bool = option(True, "Log every request.")

    def validate(self) -> None:
        """Refuse invalid options before a model is loaded."""
        super().validate()
        if not 0 <= self.port < 2**16:
            raise refused("port", self.port, "ports are 0 to 65535")
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= low):
                raise refused(name, value, f"it must be at least {low}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValidationError("ssl_keyfile and ssl_ca_certs need --ssl-certfile; give it, too")
        if self.response_store == IN_MEMORY and self.api_server_count > 1:
            raise refused(
                "response_store",
                self.response_store,
                f"api_server_count={self.api_server_count} processes share only a file",
            )
        if not self.metrics_prefix.isidentifier():
            raise refused("metrics_prefix", self.metrics_prefix, "use letters, digits and '_'")
        for key in self.api_key:
            check_key("api_key", key)
        for key in self.admin_api_key:
            check_key("admin_api_key", key)
        if self.admin_without_key and (self.admin_api_key or self.admin_api_key_file):
            raise ValidationError(
                "admin_without_key and admin_api_key contradict each other; give one of them"
            )


_LOWEST = {
    "api_server_count": 1,
    "max_body_bytes": 1,
    "max_tokenize_tokens": 1,
    "max_header_bytes": 1024,
    "max_json_depth": 1,
    "max_queued_requests": 0,
    "response_store_bytes": 1,
    "batch_dir_bytes": 1,
    "max_batch_file_bytes": 1,
    "max_batch_lines": 1,
    "max_batches": 1,
    "max_batch_requests": 1,
    "max_queued_tokens": 1,
    "max_queued_bytes": 1,
    "max_request_logprobs": 0,
    "request_timeout": 0.001,
    "client_timeout": 0.001,
    "chat_template_timeout": 0.001,
    "sse_keep_alive_interval": 0,
    "shutdown_timeout": 0,
}


def check_key(name: str, key: str) -> None:
    """Refuse a key that cannot be sent in a header. The error does not contain the key."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValidationError(
            f"{name}: a key must be printable ASCII without spaces, and not empty", parameter=name
        )
