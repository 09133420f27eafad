"""Health, readiness, metrics, version; the framing of streams; and the application of a prefill
worker.
"""

import pytest
from prometheus_client.parser import text_string_to_metric_families

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def test_health_follows_the_engine(rig, http):
    assert (await http.get("/health")).json() == {"status": "ok", "reason": None}
    rig.backend.dead = "engine process ended with 137"
    response = await http.get("/health")

    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reason": "engine process ended with 137"}
    assert (await http.get("/ready")).json()["reason"] == "engine process ended with 137"


async def test_health_of_a_worker_that_serves_says_what_falls_short(rig, http):
    rig.backend.short = "1 of 2 engines do not serve: engine 0 is lost: it ended"

    for route in ("/health", "/ready"):
        response = await http.get(route)
        assert (response.status_code, response.json()) == (
            200,
            {"status": "ok", "reason": rig.backend.short},
        )


async def test_a_request_that_comes_in_a_drain_is_passed_on(rig, http):
    rig.backend.not_ready, rig.backend.drains = "this worker is draining", True

    assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
    assert (await http.get("/ready")).json()["reason"] == "this worker is draining"
    assert (await http.get("/metrics")).status_code == 200


async def test_models_leave_out_the_length_until_the_engine_is_ready(rig, http):
    rig.backend.max_model_len = 0
    one = (await http.get("/v1/models/tiny")).json()

    assert one == {
        "id": "tiny",
        "object": "model",
        "type": "model",
        "display_name": "tiny",
        "created": one["created"],
        "created_at": one["created_at"],
        "owned_by": "pdcluster",
    }
    assert (await http.get("/v1/models")).json()["data"] == [one]
    rig.backend.max_model_len = 200
    assert (await http.get("/v1/models/tiny")).json() == {**one, "max_model_len": 200}


async def test_version_says_the_length_and_why_it_is_lower_than_the_models(rig, http):
    version = (await http.get("/version")).json()
    assert (version["max_model_len"], "note" in version) == (200, False)
    rig.backend.length_note = "lowered"
    assert (await http.get("/version")).json()["note"] == "lowered"


async def test_metrics_parse_and_count_a_request(rig, http):
    await http.post("/v1/chat/completions", json=BODY)
    families = {
        family.name: family
        for family in text_string_to_metric_families((await http.get("/metrics")).text)
    }
    counts = {
        name: sum(
            sample.value
            for sample in families[f"pdcluster_{name}"].samples
            if sample.name.endswith("_count")
        )
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "ttft_phase_seconds",
        )
    }

    assert counts == {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 13,
        "time_per_output_token_seconds": 1,
        "e2e_request_latency_seconds": 1,
        "ttft_phase_seconds": 2,
    }
    assert rig.value("pdcluster_request_success_total", finish_reason="stop") == 1
    assert rig.value("pdcluster_ttft_phase_seconds_sum", phase="queue") == pytest.approx(0.01)
    assert rig.value("pdcluster_ttft_phase_seconds_sum", phase="prefill") == pytest.approx(0.02)


async def test_answers_carry_an_id_of_ours_and_log_the_clients(rig, http, caplog):
    rig.backend.error = ZeroDivisionError()
    first = await http.get("/version", headers={"x-request-id": "mine"})
    second = await http.post(
        "/v1/chat/completions", json=BODY, headers={"x-request-id": "mine\x7f" + "x" * 99}
    )

    assert first.headers["x-request-id"] not in ("mine", second.headers["x-request-id"])
    assert "label='mine\\x7fxxx" in caplog.text


async def test_adapters_are_models_of_their_own_and_their_cache_is_apart(rig, http):
    rig.backend.adapters = {"sql": ""}

    cards = (await http.get("/v1/models")).json()["data"]
    answers = [
        (await http.post("/v1/chat/completions", json={**BODY, "model": name})).json()
        for name in ("tiny", "sql")
    ]
    unknown = await http.post("/v1/chat/completions", json={**BODY, "model": "SQL"})

    assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), ("sql", "tiny")]
    assert (await http.get("/v1/models/sql")).json() == cards[1]
    assert [answer["model"] for answer in answers] == ["tiny", "sql"]
    (base,), (adapted,) = (specs for specs, _ in rig.backend.calls)
    assert (base.adapter, adapted.adapter) == ("", "sql")
    assert (base.cache_salt, len(adapted.cache_salt)) == (b"", 32)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == (
        "model 'SQL' is not served here: use 'tiny' or one of its adapters, which /v1/models lists"
    )


async def test_embeddings_need_another_model(http):
    reply = await http.post("/v1/embeddings", json={"model": "tiny", "input": "a"})

    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == (
        "the model that is served generates text, and makes no embeddings: ask a PDCluster whose "
        "model does, of engine.type: vllm with roles.mixed and model.frontend: engine"
    )


async def test_unknown_path_is_a_404_that_names_the_others(http):
    reply = await http.post("/v1/images", json={})

    assert reply.status_code == 404
    assert "there is no such path" in reply.json()["error"]["message"]
