"""Fields of OpenAI, vLLM and SGLang that are not served: refused by name, or without effect."""

from typing import Annotated, Any

from pdcluster_worker.server.http.json_body import Ignored
from pdcluster_worker.server.schemas.fields import Body, Only

_NO_LOGITS = "what users' code does to logits is not run here: use logit_bias"
_LORA = "give the adapter in model.adapters of the PDCluster, and its name in model"
_ROUTE = "workers are chosen by policy, and pdcluster.prefill may say where the prompt is computed"
_ONE_CACHE = "the prefix cache finds prompts by their tokens, for as long as there is room"
_LABEL = "an answer's id is ours; the header x-request-id is in the log"
_AS_SET = "images are processed as the model's folder and the engine's flags say"
_TEXT_ANSWERS = "this server answers with text"


class KnownFields(Body):
    """Fields of both APIs."""

    user: Annotated[Any, Ignored("clients are identified by their API keys")] = None
    safety_identifier: Annotated[Any, Ignored("clients are identified by their API keys")] = None
    metadata: Annotated[Any, Ignored("nothing is stored that it could be found by")] = None
    store: Annotated[Any, Ignored("nothing is stored")] = None
    service_tier: Annotated[Any, Ignored("there is one tier; see priority")] = None
    prompt_cache_key: Annotated[Any, Ignored(_ONE_CACHE)] = None
    prompt_cache_retention: Annotated[Any, Ignored(_ONE_CACHE)] = None
    prompt_cache_options: Annotated[Any, Ignored(_ONE_CACHE)] = None
    request_id: Annotated[Any, Ignored(_LABEL)] = None
    rid: Annotated[Any, Ignored(_LABEL)] = None
    guided_decoding_backend: Annotated[Any, Ignored("one library follows all grammars")] = None
    spaces_between_special_tokens: Annotated[
        Any, Ignored("text is what the tokenizer makes of it")
    ] = None

    use_beam_search: Annotated[Any, Only(None, False, fix="ask for n choices")] = None
    length_penalty: Annotated[Any, Only(None, 1, 1.0, fix="there is no beam search")] = None
    early_stopping: Annotated[Any, Only(None, False, fix="there is no beam search")] = None
    truncate_prompt_tokens: Annotated[
        Any, Only(None, fix="shorten the prompt before it is sent")
    ] = None
    bad_words: Annotated[Any, Only(None, [], fix="use logit_bias, or structured_outputs.regex")] = (
        None
    )
    allowed_token_ids: Annotated[Any, Only(None, fix="use structured_outputs.choice or .regex")] = (
        None
    )
    logits_processors: Annotated[Any, Only(None, [], fix=_NO_LOGITS)] = None
    custom_logit_processor: Annotated[Any, Only(None, fix=_NO_LOGITS)] = None
    custom_params: Annotated[Any, Only(None, {}, fix=_NO_LOGITS)] = None
    vllm_xargs: Annotated[Any, Only(None, {}, fix="none of its arguments is known here")] = None
    kv_transfer_params: Annotated[Any, Only(None, {}, fix=_ROUTE)] = None
    bootstrap_host: Annotated[Any, Only(None, fix=_ROUTE)] = None
    bootstrap_port: Annotated[Any, Only(None, fix=_ROUTE)] = None
    bootstrap_room: Annotated[Any, Only(None, fix=_ROUTE)] = None
    data_parallel_rank: Annotated[Any, Only(None, fix=_ROUTE)] = None
    session_params: Annotated[Any, Only(None, {}, fix="use pdcluster.session")] = None
    routed_dp_rank: Annotated[Any, Only(None, fix=_ROUTE)] = None
    disagg_prefill_dp_rank: Annotated[Any, Only(None, fix=_ROUTE)] = None
    input_ids: Annotated[Any, Only(None, fix="give token ids as prompt to /v1/completions")] = None
    input_embeds: Annotated[Any, Only(None, fix="send text, or token ids to /v1/completions")] = (
        None
    )
    extra_key: Annotated[Any, Only(None, fix="use cache_salt")] = None
    lora_path: Annotated[Any, Only(None, [], fix=_LORA)] = None
    regex: Annotated[Any, Only(None, fix="use structured_outputs.regex")] = None
    ebnf: Annotated[Any, Only(None, fix="use structured_outputs.grammar")] = None
    json_schema: Annotated[Any, Only(None, fix="use response_format")] = None
    guided_whitespace_pattern: Annotated[Any, Only(None, fix="say it in a grammar")] = None
    stop_regex: Annotated[Any, Only(None, [], fix="use stop, of plain strings")] = None
    no_stop_trim: Annotated[Any, Only(None, False, fix="use include_stop_str_in_output")] = None
    return_hidden_states: Annotated[Any, Only(None, False, fix=_TEXT_ANSWERS)] = None
    return_routed_experts: Annotated[Any, Only(None, False, fix=_TEXT_ANSWERS)] = None
    mm_processor_kwargs: Annotated[Any, Only(None, {}, fix=_AS_SET)] = None
    media_io_kwargs: Annotated[Any, Only(None, {}, fix=_AS_SET)] = None
    extra_body: Annotated[
        Any,
        Only(None, {}, fix="it is an argument of OpenAI's client: its fields go beside the others"),
    ] = None


class KnownChatFields(KnownFields):
    """Those of chat alone beside them."""

    verbosity: Annotated[Any, Ignored("the model writes as it is asked to in the prompt")] = None
    modalities: Annotated[Any, Only(None, ["text"], fix=_TEXT_ANSWERS)] = None
    audio: Annotated[Any, Only(None, fix=_TEXT_ANSWERS)] = None
    prediction: Annotated[
        Any, Only(None, fix="drafts are the engine's own (engine.speculation)")
    ] = None
    separate_reasoning: Annotated[
        Any, Only(None, True, fix="model.reasoningParser: none keeps it in the text")
    ] = None
    stream_reasoning: Annotated[
        Any, Only(None, True, fix="include_reasoning: false leaves it out")
    ] = None
    web_search_options: Annotated[
        Any, Only(None, fix="search, and put what is found into a message")
    ] = None
