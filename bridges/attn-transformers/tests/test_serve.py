"""``attn serve``: transformers' server over HTTP answers as the model's own attention does, and our backend did the work."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from tiny_models import VOCABULARY, make

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from attn_core.errors import UsageError
from attn_transformers.serve import serve, server_arguments

MESSAGES = [{"role": "user", "content": "w7 w11 w13 w17 w19 w23"}]
NEW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with a tokenizer whose words are its token numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    target = tmp_path_factory.mktemp("tiny_llama")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1", pad_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(target)
    make("llama").save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def expected(folder):
    """The reply that the model's own attention gives."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        row = make("llama").generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(row[0, inputs["input_ids"].shape[1] :])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(port: int, folder) -> str:
    """One chat request, greedy; the reply's text."""
    body = {
        "model": str(folder),
        "messages": MESSAGES,
        "max_tokens": NEW,
        "temperature": 0.0,
        "stream": False,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def wait_for(port: int, server: subprocess.Popen) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise AssertionError(f"the server did not start: {server.communicate()[1][-3000:]}")


@pytest.mark.parametrize(
    "extra", [(), ("--continuous-batching", "--cb-num-blocks", "64")], ids=["generate", "batching"]
)
def test_a_served_model_answers_as_its_own_attention_does(folder, expected, extra):
    port = free_port()
    options = ["--attention-backend", "torch_native", "--port", str(port), "--host", "127.0.0.1", "--device", "cpu"]
    command = [sys.executable, "-m", "attn_core", "serve", str(folder), *options, "--dtype", "float32", *extra]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(port, server)
        assert ask(port, folder) == expected
        assert len(expected.split()) == NEW
    finally:
        server.terminate()
        try:
            said, ended = server.communicate(timeout=60)[1], True
        except subprocess.TimeoutExpired:
            server.kill()
            said, ended = server.communicate()[1], False
    assert ended, said[-3000:]
    assert "torch_native" in said.split("calls ")[0]  # the plan, before the first request
    calls = re.search(r"calls +(?:mha/)?torch_native[^:]*: (.*)", said)
    assert calls, said[-3000:]
    assert "prefill" in calls[1]
    assert "decode" in calls[1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--attn-implementation", "sdpa"], "the plan chooses"),
        (["--force-model=x"], "the model is the argument"),
        (["--continuous-batching", "--cb-use-cuda-graph"], "cannot be given"),
        (["--compile"], "static cache"),
    ],
)
def test_options_that_would_bypass_the_plan_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        server_arguments(given)


@pytest.mark.parametrize("first", ["--continuous-batching", "--attn-implementation=sdpa", "--port"])
def test_an_option_in_the_place_of_the_model_is_refused(first):
    with pytest.raises(UsageError, match="MODEL comes first"):
        serve(first, {}, max_tokens=64, server=["some-model"])


def test_steps_are_not_captured_under_continuous_batching():
    assert server_arguments(["--port", "1"]) == ["--port", "1"]
    assert server_arguments(["--continuous-batching"]) == ["--continuous-batching", "--no-cb-use-cuda-graph"]
