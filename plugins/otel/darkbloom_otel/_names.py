"""Every name that leaves: attributes, metrics and buckets.

The ``gen_ai`` names are those of OpenTelemetry's semantic conventions for generative AI,
which are in development and still move; ``SCHEMA_URL`` says which version is meant. What
they have no name for starts with ``darkbloom``.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai-dev/1.42.0-dev"
SCOPE = "darkbloom"
PROVIDER = "darkbloom"

# --- attributes of the conventions
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
USAGE_REASONING_OUTPUT_TOKENS = "gen_ai.usage.reasoning.output_tokens"
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
HTTP_STATUS = "http.response.status_code"

# --- attributes of our own
MEDIA_KIND = "darkbloom.media.kind"
REQUEST_ID = "darkbloom.request.id"
QUEUE_SECONDS = "darkbloom.queue_seconds"
PREFILL_SECONDS = "darkbloom.prefill_seconds"
DECODE_SECONDS = "darkbloom.decode_seconds"
MALFORMED_OUTPUTS = "darkbloom.malformed_outputs"
FAMILY = "darkbloom.family"
SLOT_STATE = "darkbloom.slot.state"
SLOT_ACTIVITY = "darkbloom.slot.activity"
LEDGER_KIND = "darkbloom.ledger.kind"
FINISH_REASON = "darkbloom.finish_reason"
PREFIX_OUTCOME = "darkbloom.prefix.outcome"
PART = "darkbloom.cache.part"
PLUGIN = "darkbloom.plugin.name"
PLUGIN_STATE = "darkbloom.plugin.state"
SINK = "darkbloom.sink.name"
CACHE_TIER = "darkbloom.cache.tier"
CACHE_PARTS = "darkbloom.cache.parts"
CACHE_PARTS_MISSING = "darkbloom.cache.parts_missing"
CACHE_PARTS_DROPPED = "darkbloom.cache.parts_dropped"
CACHE_SIZE = "darkbloom.cache.size_bytes"

# --- metrics of the conventions
REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"

# --- metrics of our own
QUEUE_DURATION = "darkbloom.request.queue.duration"
PREFILL_DURATION = "darkbloom.request.prefill.duration"
DECODE_DURATION = "darkbloom.request.decode.duration"
REQUESTS_ACTIVE = "darkbloom.requests.active"
REQUESTS_REFUSED = "darkbloom.requests.refused"
OUTPUTS = "darkbloom.outputs"
OUTPUTS_MALFORMED = "darkbloom.outputs.malformed"
INPUT_TOKENS = "darkbloom.tokens.input"
CACHED_INPUT_TOKENS = "darkbloom.tokens.input.cached"
OUTPUT_TOKENS = "darkbloom.tokens.output"
REASONING_OUTPUT_TOKENS = "darkbloom.tokens.output.reasoning"
SEQUENCES_RUNNING = "darkbloom.sequences.running"
SEQUENCES_WAITING = "darkbloom.sequences.waiting"
KV_USED = "darkbloom.kv.used"
KV_RESERVED = "darkbloom.kv.reserved"
KV_GRANT = "darkbloom.kv.grant"
ENGINE_DECODE_STEPS = "darkbloom.engine.decode_steps"
ENGINE_PREFILL_TOKENS = "darkbloom.engine.prefill_tokens"
ENGINE_OUTPUT_TOKENS = "darkbloom.engine.output_tokens"
PREFIX_LOOKUPS = "darkbloom.prefix.lookups"
PREFIX_REUSED = "darkbloom.prefix.tokens.reused"
PREFIX_WAITS = "darkbloom.prefix.waits"
PREFIX_UNOFFERED = "darkbloom.prefix.parts.unoffered"
CACHE_BYTES = "darkbloom.cache.bytes"
CACHE_LIMIT = "darkbloom.cache.limit"
CACHE_HITS = "darkbloom.cache.hits"
CACHE_MISSES = "darkbloom.cache.misses"
CACHE_EVICTIONS = "darkbloom.cache.evictions"
CACHE_REFUSALS = "darkbloom.cache.refusals"
CACHE_FAULTS = "darkbloom.cache.faults"
CACHE_FETCH_DURATION = "darkbloom.cache.fetch.duration"
CACHE_FETCHED = "darkbloom.cache.fetched"
CACHE_FETCHED_PARTS = "darkbloom.cache.fetched.parts"
CACHE_MISSING_PARTS = "darkbloom.cache.missing.parts"
CACHE_WRITTEN = "darkbloom.cache.written"
CACHE_WRITTEN_PARTS = "darkbloom.cache.written.parts"
CACHE_DROPPED_PARTS = "darkbloom.cache.dropped.parts"
ARRAYS = "darkbloom.arrays"
SLOTS = "darkbloom.slots"
SLOT_ACTIVITIES = "darkbloom.slots.activity"
SLOT_FAILURES = "darkbloom.slots.failures"
LEDGER_STUCK = "darkbloom.ledger.stuck"
LEDGER_DROPPED = "darkbloom.ledger.dropped"
PLUGIN_FAILURES = "darkbloom.plugin.failures"
SINK_FAILURES = "darkbloom.sink.failures"

# --- buckets, in seconds
DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
# The conventions begin at 0.01, which is 100 tokens a second: too coarse for a small model.
TIME_PER_OUTPUT_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008,
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
