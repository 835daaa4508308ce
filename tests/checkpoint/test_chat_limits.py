"""Chat templates that never end or fill the memory, and real ones, which must not notice."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import make_tokenizer
from other_processes import is_running
from paths import ROOT
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint import chat_process
from bytetx.checkpoint.chat_process import RendererProcess
from bytetx.checkpoint.chat_template import ChatTemplate
from bytetx.errors import CheckpointError, InputError

CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "no reason"},
    {"role": "user", "content": "how?"},
]
MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"
GROW = "{% set ns = namespace(x='a', l=[1]) %}{% for i in range(60) %}"
# Each of them hung the process, filled its memory or raised an internal error.
ATTACKS = {
    "loop": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": MANY * 3 + END * 3,
    "nested loops that write": MANY * 3 + "x" + END * 3,
    "loop with a condition": "{% for i in range(99999) if range(99999) | sum < 0 %}" + END,
    "string times number": "{{ 'a' * 10**10 }}",
    "string times number at run time": "{{ messages[0].role * 10**10 }}",
    "list times number": "{{ ([messages] * 10**10) | length }}",
    "power tower": "{{ 10**(10**10) }}",
    "power tower at run time": "{{ (messages | length) ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}{{ ns.x % 7 }}",
    "doubled text": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}",
    "doubled block": "{% set x = 'a' %}{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% else %}a{% endif %}{% endmacro %}{{ f(60) }}",
    "doubled list": GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | length }}",
    "text of a list of lists": GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "json of a list of lists": GROW
    + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "equality of lists of lists": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "center": "{{ 'a' | center(10**10) }}",
    "indent": "{{ ('a\\n' * 10**6) | indent(10**5) | length }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "precision": "{{ '%.2000000000f' % 1 }}",
    "str.format": "{{ '{:10000000000}'.format(1) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "replace": "{{ ('a' * 10**5).replace('', 'b' * 10**5) }}",
    "join": "{{ range(99999) | join('x' * 10**6) }}",
    "batch": "{{ range(9) | batch(10**9, 'x') | list | length }}",
    "slice": "{{ range(9) | slice(10**9) | list | length }}",
    "sum of lists": "{{ ([range(99999) | list] * 99999) | sum(start=[]) | length }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "wordwrap": "{{ ('a ' * 10**7) | wordwrap(1) | wordwrap(1) | wordwrap(1) | length }}",
    "too much text": MANY + "{{ 'x' * 1000 }}" + END,
}


def template(source: str, *, seconds: float = 30) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={}, name="a test", seconds=seconds)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_without_an_end_hangs_the_process(name: str) -> None:
    attacked = template(ATTACKS[name], seconds=0.5)
    started = time.monotonic()
    with pytest.raises((CheckpointError, InputError), match="a test: the chat template"):
        attacked.render(CHAT)
    # Half a second and the start of a process, on a machine that does other things, too.
    assert time.monotonic() - started < 30
    with pytest.raises((CheckpointError, InputError)):
        attacked.render(CHAT)


def test_a_template_that_recurses() -> None:
    with pytest.raises(InputError, match="refuses it: RecursionError"):
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").render(CHAT)
    with pytest.raises((CheckpointError, InputError), match="a test: the chat template"):
        template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}").render(CHAT)


def test_a_template_that_never_ends_costs_a_job_its_time_once() -> None:
    endless = template(MANY * 3 + END * 3, seconds=1)
    with pytest.raises(CheckpointError, match="does not end within 1 s, even with a chat of one"):
        endless.render(CHAT)
    started = time.monotonic()
    for _ in range(100):
        with pytest.raises(CheckpointError, match="does not end within 1 s"):
            endless.render(CHAT)
    assert time.monotonic() - started < 1


def test_a_chat_that_takes_too_long_fails_alone() -> None:
    source = "{% if messages | length > 1 %}" + MANY * 3 + END * 3 + "{% endif %}fine"
    picky = template(source, seconds=2)
    for _ in range(2):
        assert picky.render(CHAT[:1]) == "fine"
        with pytest.raises(InputError, match="does not end within 2 s with this chat"):
            picky.render(CHAT)


def test_threads_take_turns_and_get_their_own_text() -> None:
    shared, found = template("{{ messages[0].content }}"), {}

    def ask(name: str) -> None:
        found[name] = [
            shared.render([{"role": "user", "content": f"{name} {i}"}]) for i in range(50)
        ]

    threads = [threading.Thread(target=ask, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {f"thread {n}": [f"thread {n} {i}" for i in range(50)] for n in range(4)}


def test_two_templates_do_not_share_a_process() -> None:
    one, other = template("one {{ messages[0].role }}"), template(MANY * 3 + END * 3, seconds=1)
    assert one.render(CHAT) == "one system"
    with pytest.raises(CheckpointError):
        other.render(CHAT)
    assert one.render(CHAT) == "one system"


def test_a_killed_process_is_started_again() -> None:
    shared = template("{{ messages[0].role }}")
    assert shared.render(CHAT) == "system"
    shared._process._process.kill()
    with pytest.raises(InputError, match=r"ended its process \(exit code -9\)"):
        shared.render(CHAT)
    assert shared.render(CHAT) == "system"


def test_an_interrupt_leaves_no_answer_for_the_next_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = template("{{ messages[0].content }}")
    assert shared.render([{"role": "user", "content": "first"}]) == "first"

    def interrupted(self: RendererProcess, seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RendererProcess, "_receive", interrupted)
        shared.render([{"role": "user", "content": "second"}])
    assert shared.render([{"role": "user", "content": "third"}]) == "third"


def pid_of(shared: ChatTemplate) -> int:
    return shared._process._process.pid


def test_the_process_ends_with_its_template() -> None:
    shared = template("{{ messages[0].role }}")
    shared.render(CHAT)
    pid = pid_of(shared)
    del shared
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    "source", ["x", "{% if messages | length > 1 %}" + MANY * 3 + END * 3 + "{% endif %}"]
)
def test_the_process_ends_with_a_killed_owner(source: str) -> None:
    """An idle one at once; one that is busy by its limit of processor time."""
    code = (
        "import sys, threading\n"
        "from bytetx.checkpoint.chat_template import ChatTemplate\n"
        f"shared = ChatTemplate({source!r}, special_tokens={{}}, name='x', seconds=1)\n"
        f"shared.render({CHAT[:1]!r})\n"
        "print(shared._process._process.pid, flush=True)\n"
        f"threading.Thread(target=shared.render, args=({CHAT!r},), daemon=True).start()\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    pid = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def test_a_fork_starts_a_process_of_its_own() -> None:
    shared = template("{{ messages[0].role }}")
    shared.render(CHAT)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, f"{shared.render(CHAT)} {pid_of(shared)}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    text, pid = os.read(read, 100).decode().split()
    os.close(read)
    os.close(write)
    assert text == "system" and int(pid) != pid_of(shared)
    assert shared.render(CHAT) == "system"


def test_a_python_that_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("", "/no/such/python"):
        monkeypatch.setattr(chat_process.sys, "executable", executable)
        with pytest.raises(InputError, match="cannot (start one|be started).*give prompts as text"):
            template("x").render(CHAT)


@pytest.mark.parametrize("content", ["half \ud83d", "\ud83d\ude42", "日本語 🙂", "a" * 10**6, "\0"])
def test_any_text_passes_through_unchanged(content: str) -> None:
    chat = [{"role": "user", "content": content}]
    assert template("{{ messages[0].content }}").render(chat) == content


def test_what_a_message_may_hold() -> None:
    shared = template("{{ messages[0].more }}")
    for more, wanted in [
        ((1, 2), "(1, 2)"),
        ({"a": [1.5, None, True]}, "{'a': [1.5, None, True]}"),
    ]:
        assert shared.render([{"role": "user", "content": "", "more": more}]) == wanted
    loop: list[object] = []
    loop.append(loop)
    for more in (object(), loop, {1, 2}):
        with pytest.raises(InputError, match="a message of the chat"):
            shared.render([{"role": "user", "content": "", "more": more}])


def test_generate_refuses_the_job_where_the_template_never_ends(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bpe")
    tiny_decoder("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'a' * 10**10 }}")
    model = bytetx.load(tmp_path)
    params = bytetx.SamplingParams(max_tokens=2)
    with pytest.raises(CheckpointError, match="needs more than 1 GiB of memory"):
        model.generate([CHAT], params, on_error="return")
    assert len(model.generate(["text still runs"], params)) == 1


def test_many_chats_at_once_have_each_its_own_answer() -> None:
    """One that is refused, and one that ends the process, among chats larger than the buffers."""
    source = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('refused') }}{% endif %}"
        "{% if messages[0].content == 'much' %}{% for i in range(99999) %}"
        "{{ 'x' * 999999 }}{% endfor %}{% endif %}<{{ messages[0].content }}>"
    )
    template = ChatTemplate(source, special_tokens={}, name="here")
    contents = ["a", "b" * 100_000, "no", "c" * 300_000, "much", "d", *["e" * 30_000] * 9]
    chats = [template.prepared([{"role": "user", "content": text}]) for text in contents]
    for text, content in zip(template.render_all(chats), contents, strict=True):
        if content in ("no", "much"):
            assert isinstance(text, InputError)
        else:
            assert text == f"<{content}>"
    assert template.render_all([]) == []


def test_one_that_never_ends_fails_alone_among_many() -> None:
    source = (
        "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{% for i in range(99999) "
        "%}{% endfor %}{% endfor %}{% endif %}<{{ messages[0].content }}>"
    )
    template = ChatTemplate(source, special_tokens={}, name="here", seconds=1.0)
    contents = ["a", "b", "slow", *"cdefgh", "slow", *"ijk"]
    chats = [template.prepared([{"role": "user", "content": text}]) for text in contents]
    for text, content in zip(template.render_all(chats), contents, strict=True):
        if content == "slow":
            assert isinstance(text, InputError) and "does not end within" in str(text)
        else:
            assert text == f"<{content}>"
