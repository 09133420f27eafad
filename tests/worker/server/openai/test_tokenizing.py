"""POST /tokenize and /detokenize in vLLM's forms."""

HELLO = [{"role": "user", "content": "Hé"}]


async def test_a_conversation_is_tokenized_as_for_chat(rig, http):
    reply = (
        await http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True})
    ).json()
    await http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})

    assert reply["tokens"] == rig.backend.calls[0][0][0].prompt
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    text = (await http.post("/detokenize", json={"tokens": reply["tokens"]})).json()
    assert text == {"prompt": "<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n"}


async def test_tokenizing_waits_for_the_models_limits(rig, http):
    rig.backend.max_model_len = 0
    rig.backend.not_ready = "it loads"
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        reply = await http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")
        assert "it loads" in reply.text


async def test_tokenizing_is_of_the_api_and_has_no_journey(rig, http):
    async with rig.client(tenant_of=lambda key: "team" if key == "good" else None) as client:
        for path in ("/tokenize", "/detokenize"):
            assert (await client.post(path, json={"prompt": "x"})).status_code == 401
        reply = await client.post(
            "/tokenize", json={"prompt": "x"}, headers={"authorization": "Bearer good"}
        )
        assert reply.status_code == 200
        found = await client.get(
            f"/debug/requests/{reply.headers['x-request-id']}",
            headers={"authorization": "Bearer good"},
        )
        assert found.status_code == 404
