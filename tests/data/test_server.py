# SPDX-License-Identifier: Apache-2.0
"""Answers through a server that misbehaves in every way that servers do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gto_hf.cli import main
from gto_hf.data import load_jsonl
from gto_hf.data.dialogue import Dialogue
from gto_hf.data.prompts import Conversation
from gto_hf.data.server import ServerTarget
from gto_hf.trainer import script as train_script
from tests.tiny import EOS, tiny_target, tiny_tokenizer


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOKENIZER = tiny_tokenizer()


class Fake:
    """
    An OpenAI-compatible server in a thread; its answer is the last message said twice.

    Args:
        misbehave (`Callable`, *optional*): Called as `misbehave(handler, body, n)` for the n-th request (from 0) about a
            conversation; returns True if it has dealt with it.
        ids (`str`): `"vllm"` and `"sglang"` give token ids in their places, `"none"` ignores the wish, `"strict"` refuses it.
    """

    def __init__(self, misbehave=lambda handler, body, n: False, *, ids="vllm", models=("tiny",), message=None):
        self.misbehave, self.ids, self.models, self.message = misbehave, ids, models, message or {}
        self.requests, self.headers, self.lock, self.flying, self.most = [], [], threading.Lock(), 0, 0
        self.barrier = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def give(self, code, content, **headers):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                assert self.path == "/v1/models"
                self.give(200, {"data": [{"id": name} for name in fake.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.headers.append(dict(self.headers))
                if self.path != "/v1/chat/completions":
                    return self.give(404, {"detail": "Not Found"})
                if fake.ids == "strict" and "return_token_ids" in body:
                    return self.give(422, {"detail": "extra field return_token_ids"})
                if body["max_tokens"] == 1 and body["messages"][0]["content"] == "Hello":  # the probe
                    return self.give(200, fake.reply(body))
                with fake.lock:
                    n = sum(body["messages"] == other["messages"] for other in fake.requests)
                    fake.requests.append(body)
                if fake.barrier is not None:
                    fake.barrier.wait(20)
                if not fake.misbehave(self, body, n):
                    self.give(200, fake.reply(body))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def reply(self, body):
        said = body["messages"][-1]["content"]
        text = said * 2
        cut = len(text) > body["max_tokens"]
        text = text[: body["max_tokens"]]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, **self.message},
            "finish_reason": "length" if cut else "stop",
        }
        reply = {"choices": [choice], "usage": {"completion_tokens": len(text)}}
        if body.get("return_token_ids") and self.ids in ("vllm", "sglang"):
            prompt = TOKENIZER("".join(message["content"] for message in body["messages"]))["input_ids"]
            choice["token_ids"] = TOKENIZER(text)["input_ids"] + ([] if cut else [EOS])
            (reply if self.ids == "vllm" else choice)["prompt_token_ids"] = prompt
        return reply

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """No test waits for the second attempt."""
    defaults = {**ServerTarget.__init__.__kwdefaults__, "pause": 0.001, "timeout": 10.0}
    monkeypatch.setattr(ServerTarget.__init__, "__kwdefaults__", defaults)


ROWS = [{"id": f"q{i}", "prompt": "ABCDEFGHIJKL"[: 2 + i], "source": "x"} for i in range(8)]
ROWS.append({"id": "two", "turns": ["WHO", "WHY"], "source": "y"})


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def command(fake, prompts, output, *options):
    return [
        "regenerate", "--server", fake.url, "--prompts", str(prompts), "--output", str(output), "--max-new-tokens",
        "16", "--concurrency", "4", *options,
    ]  # fmt: skip


def answers(path):
    """Rows by `(id, answer, turn)`; fails on doubles."""
    rows = load_jsonl(path)
    found = {(row["id"], row["answer"], row["turn"]): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("ids", ["vllm", "sglang"])
def test_rows_hold_the_ids_that_the_server_read_and_generated(prompts, tmp_path, ids):
    with Fake(ids=ids) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--answers", "2", "--top-k", "7")) == 0
    rows = answers(tmp_path / "out.jsonl")
    assert {key[:2] for key in rows} == {(row["id"], answer) for row in ROWS for answer in range(2)}
    for i in range(8):
        row = rows[f"q{i}", 1, 0]
        prompt = TOKENIZER(ROWS[i]["prompt"])["input_ids"]
        new = [*(prompt * 2)[:16], *([EOS] if 2 * len(prompt) <= 16 else [])]
        assert row["input_ids"] == prompt + new and row["labels"] == [-100] * len(prompt) + new
        assert row["finished"] == (2 * len(prompt) <= 16) and row["source"] == "x" and row["last"]
        assert row["messages"][-1] == {"role": "assistant", "content": (ROWS[i]["prompt"] * 2)[:16]}
    # the end token is not shown to the second turn by this template, so that turn has its own row
    first, second = rows["two", 0, 0], rows["two", 0, 1]
    assert not first["last"] and second["last"] and second["messages"][1]["content"] == "WHOWHO"
    assert second["input_ids"][: -len("WHYWHY") - 1] == TOKENIZER("WHOWHOWHOWHY")["input_ids"]
    assert all(body["top_k"] == 7 and body["model"] == "tiny" and "top_p" not in body for body in fake.requests)
    seeds = [body["seed"] for body in fake.requests]
    assert len(set(seeds)) == len(seeds) == 2 * 10  # every turn of every answer draws anew


@pytest.mark.parametrize("ids", ["none", "strict"])
def test_without_ids_the_rows_are_messages(prompts, tmp_path, capsys, ids):
    with Fake(ids=ids) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--greedy")) == 0
    assert "gives no token ids" in capsys.readouterr().out
    rows = answers(tmp_path / "out.jsonl")
    assert len(rows) == 9 and not any("input_ids" in row for row in rows.values())
    said = [message["content"] for message in rows["two", 0, 1]["messages"]]
    assert said == ["WHO", "WHOWHO", "WHY", "WHYWHY"]
    assert all(body["temperature"] == 0 for body in fake.requests)


@pytest.mark.parametrize("message", [{"reasoning_content": "HM"}, {"reasoning": "HM"}])
def test_thoughts_that_the_server_took_apart_are_kept_and_not_trained_as_history(prompts, tmp_path, message):
    with Fake(ids="none", message=message) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl")) == 0
    rows = answers(tmp_path / "out.jsonl")
    assert rows["two", 0, 0]["messages"][-1]["reasoning_content"] == "HM"
    assert rows["two", 0, 1]["messages"][-1]["reasoning_content"] == "HM"


# ---------------------------------------------------------------- what passes
def failing(*ways):
    """The first requests about each conversation fail in these ways."""

    def misbehave(handler, body, n):
        if n >= len(ways):
            return False
        way = ways[n]
        if way == "drop":
            handler.connection.close()
        elif way == "half":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.connection.close()
        elif way == "garbage":
            handler.give(200, b"<html>")
        elif way == "empty":
            handler.give(200, {"object": "error"})
        else:
            handler.give(way, {"error": {"message": f"error {way}"}}, Retry_After="0")
        return True

    return misbehave


@pytest.mark.parametrize("way", [429, 500, 503, 408, "drop", "half", "garbage", "empty"])
def test_what_passes_is_tried_again(prompts, tmp_path, way):
    with Fake(failing(way, way)) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl")) == 0
    assert len({key[:2] for key in answers(tmp_path / "out.jsonl")}) == 9
    assert len(fake.requests) == 3 * 10


def test_a_server_that_stays_away_ends_the_run_and_loses_nothing(prompts, tmp_path, capsys):
    down = threading.Event()

    def misbehave(handler, body, n):
        if len(fake.requests) > 5:
            down.set()
        return down.is_set() and (handler.give(503, b"busy") or True)

    with Fake(misbehave) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--concurrency", "2")) == 1
        err = capsys.readouterr().err
        assert "HTTP 503: busy" in err and "again to go on" in err
        before = (tmp_path / "out.jsonl").read_bytes()
        done = answers(tmp_path / "out.jsonl")
        assert 3 <= len(done) < 9
        fake.misbehave = lambda *_: False
        fake.requests.clear()
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--concurrency", "2")) == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert {key[:2] for key in answers(tmp_path / "out.jsonl")} == {(row["id"], 0) for row in ROWS}
    asked = {body["messages"][0]["content"] for body in fake.requests}
    assert not asked & {row["messages"][0]["content"] for row in done.values()}  # nothing is asked twice


def test_a_file_cut_at_any_byte_is_completed_without_loss_or_doubles(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    with Fake() as fake:
        assert main(command(fake, prompts, output, "--concurrency", "1")) == 0
        whole = output.read_bytes()
        expected = answers(output)
        ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
        first_of_two = 1 + next(i for i, line in enumerate(whole.splitlines()) if b'"two"' in line)
        for cut in (1, ends[0], ends[2] - 1, ends[first_of_two - 1], ends[first_of_two - 1] + 9, len(whole) - 1):
            output.write_bytes(whole[:cut])
            assert main(command(fake, prompts, output)) == 0
            assert answers(output) == expected


def test_several_conversations_are_in_flight(prompts, tmp_path):
    with Fake() as fake:
        fake.barrier = threading.Barrier(4)  # opens only when four requests are there
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--limit", "8")) == 0
    assert len(answers(tmp_path / "out.jsonl")) == 8


# ---------------------------------------------------------------- what does not pass
def test_conversations_that_the_server_refuses_are_skipped_and_counted(prompts, tmp_path, capsys):
    def misbehave(handler, body, n):
        too_long = len(body["messages"][-1]["content"]) > 7 or body["messages"][-1]["content"] == "WHY"
        return too_long and (handler.give(400, {"error": {"message": "too long"}}) or True)

    with Fake(misbehave) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl")) == 0
    assert "skipped 2: HTTP 400: too long (id q" in capsys.readouterr().out
    rows = answers(tmp_path / "out.jsonl")
    assert len(rows) == 7 and rows["two", 0, 0]["last"]  # what was answered before the refusal stays
    assert len(fake.requests) == 10  # nothing refused is asked again
    with Fake(lambda handler, body, n: handler.give(400, {"message": "never"}) or True) as fake:
        assert main(command(fake, prompts, tmp_path / "b.jsonl")) == 1
    assert "None of the 9 prompts was answered.\nskipped 9: HTTP 400: never" in capsys.readouterr().err


@pytest.mark.parametrize("code", [401, 403, 404])
def test_errors_that_are_no_conversations_fault_end_the_run_at_once(prompts, tmp_path, capsys, code):
    with Fake(failing(*[code] * 9)) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--concurrency", "1")) == 1
    assert f"HTTP {code}: error {code}" in capsys.readouterr().err
    assert len(fake.requests) == 1


def test_wrong_addresses_models_and_options_are_named_before_work(prompts, tmp_path, capsys):
    def error(*options, **kwargs):
        with Fake(**kwargs) as fake:
            assert main(command(fake, prompts, tmp_path / "out.jsonl", *options)) == 1
        assert not fake.requests and not (tmp_path / "out.jsonl").exists()
        return capsys.readouterr().err

    assert "serves ['a', 'b']; choose one with `--model`" in error(models=("a", "b"))
    assert "serves no model" in error(models=())
    assert "not told num_beams" in error("--generation-config", '{"num_beams": 2}')
    assert "`--api-key-env NO_KEY`" in error("--api-key-env", "NO_KEY")
    assert "`concurrency=0`" in error("--concurrency", "0")
    with Fake() as fake:
        pass
    assert main(command(fake, prompts, tmp_path / "out.jsonl")) == 1  # nobody listens there
    assert "failed 3 times" in capsys.readouterr().err
    fake.url = fake.url.replace("http", "ftp")
    assert main(command(fake, prompts, tmp_path / "out.jsonl")) == 1
    assert "must be an address" in capsys.readouterr().err


def test_the_key_goes_into_the_header_and_nowhere_else(prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret-123")
    with Fake() as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl", "--api-key-env", "SOME_KEY")) == 0
        assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret-123"}
        fake.headers.clear()
        assert main(command(fake, prompts, tmp_path / "b.jsonl")) == 0
        assert not any("Authorization" in headers for headers in fake.headers)
    assert not any(b"secret-123" in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


def test_another_server_may_go_on_but_not_another_model_or_one_without_ids(prompts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    with Fake() as fake:
        assert main(command(fake, prompts, output, "--limit", "9")) == 0
    with Fake(models=("other",)) as fake:
        assert main(command(fake, prompts, output)) == 1
    assert '`model` was "tiny" and is "other"' in capsys.readouterr().err
    with Fake(ids="none") as fake:
        assert main(command(fake, prompts, output)) == 1
    assert "`token_ids` was true and is false" in capsys.readouterr().err
    with Fake() as fake:
        assert main(command(fake, prompts, output)) == 0 and not fake.requests


def test_tools_and_template_options_are_sent_and_calls_end_a_conversation():
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = Conversation(
        "1", (({"role": "user", "content": "A"},), ({"role": "user", "content": "B"},)), {"tools": tools}
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with Fake(message={"tool_calls": calls}) as fake:
        server = ServerTarget(fake.url, {"max_new_tokens": 4}, template_kwargs={"enable_thinking": False})
        server.connect()
        (row,) = server.answer(Dialogue(asked, 0)).rows
    assert row["last"] and row["messages"][-1]["tool_calls"] == calls
    assert fake.requests[0]["tools"] == tools
    assert fake.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}


# ---------------------------------------------------------------- training on the file
@pytest.mark.parametrize("ids", ["vllm", "none"])
def test_the_file_is_trained_on_as_it_is(prompts, tmp_path, ids):
    tiny_target().save_pretrained(tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "target")
    with Fake(ids=ids) as fake:
        assert main(command(fake, prompts, tmp_path / "out.jsonl")) == 0
    train_script.main(
        [
            "--target_model_name_or_path", f"{tmp_path}/target", "--dataset_name", f"{tmp_path}/out.jsonl",
            "--output_dir", f"{tmp_path}/draft", "--max_steps", "1", "--bf16", "False", "--report_to", "none",
            "--tree_depth", "2", "--tree_top_k", "3", "--tree_total_tokens", "6", "--group_size", "3",
            "--disable_tqdm", "True",
        ]
    )  # fmt: skip
    assert (tmp_path / "draft" / "model.safetensors").is_file()
