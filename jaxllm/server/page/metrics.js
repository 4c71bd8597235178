// From a page of /metrics to what the pictures show.

const SAMPLE = /^\w+:(\w+)(?:\{.*\})? (\S+)$/;

// Name without its prefix (jaxllm: or vllm:) -> values, one for each engine.
export function parse(page) {
  const found = new Map();
  for (const line of page.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (!sample) continue;
    const [, name, value] = sample;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(Number(value));
  }
  return found;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

// The figures as of now, and of the time since the page before; null is what cannot be said.
export function figures(now, before) {
  const total = (name) => sum(now.page.get(name) ?? []);
  const usage = now.page.get("kv_cache_usage_perc") ?? [];
  // A server that has started anew counts from zero.
  const grown = (name) =>
    before ? Math.max(0, total(name) - sum(before.page.get(name) ?? [])) : 0;
  const seconds = before ? (now.time - before.time) / 1000 : null;
  const rate = (name) => (seconds === null ? null : grown(name) / seconds);
  const ratio = (part, whole) => (grown(whole) > 0 ? grown(part) / grown(whole) : null);
  const stepSeconds = ratio("engine_step_seconds_total", "engine_steps_total");
  return {
    running: total("num_requests_running"),
    waiting: total("num_requests_waiting"),
    kvUse: usage.length ? (100 * sum(usage)) / usage.length : null,
    generated: rate("generation_tokens_total"),
    prompt: rate("prompt_tokens_total"),
    stepMs: stepSeconds === null ? null : 1000 * stepSeconds,
    queries: grown("prefix_cache_queries_total"),
    hits: grown("prefix_cache_hits_total"),
  };
}
