"""The status page in headless Chromium: its states, both colour schemes, and trying a text."""

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from status_stand_in import PAGE, StandIn, stand_in, stats

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)"
)
# Without these a fresh profile asks hosts of its maker at every start.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
QUIET += ["--disable-component-update", "--no-first-run"]
VECTORS = [[0.6, 0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]]
TOKENS = [{"id": 101, "text": "[CLS]", "special": True}, {"id": 7, "text": "hello"}]
MARKUP = "<img src=x onerror=alert(1)>"
CHANCES = {"choice": MARKUP, "confidence": 0.9, "probabilities": {"a" * 99: 0.1, MARKUP: 0.9}}


@dataclass
class Tab:
    """A page, and what it complained of."""

    page: "sync_api.Page"
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(params=["light"])
def tab(browser: "sync_api.Browser", request: pytest.FixtureRequest) -> Iterator[Tab]:
    """An empty tab; a test may ask for other colour schemes by its indirect parameter."""
    page = browser.new_page(color_scheme=request.param, viewport={"width": 1200, "height": 900})
    page.set_default_timeout(20_000)
    tab = Tab(page)
    page.on("console", lambda message: tab.complaints.append(message.text))
    page.on("pageerror", lambda error: tab.complaints.append(str(error)))
    page.on("dialog", lambda dialog: tab.complaints.append(f"dialog: {dialog.message}"))
    yield tab
    page.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    answers = {"/stats.json": (200, stats(80)), "/tokenize": (200, [TOKENS])}
    with stand_in(answers) as state:
        yield state


def test_the_policy_of_the_page_allows_its_own_script_and_style_alone() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page, f"the page's {tag} changed: put this there"
    assert "default-src 'none'" in page and "unsafe" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|\son\w+=""", page)
    script = page.partition("<script>")[2]
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Storage",
    ):
        assert sink not in script


@needs_chromium
@pytest.mark.parametrize("tab", ["light", "dark"], indirect=True)
def test_it_shows_what_packing_saved_and_how_the_server_does(tab: Tab, server: StandIn) -> None:
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#chart .column")
    drawn = tab.page.locator("#chart .column").count()
    steps = stats(80)["steps"][-drawn:]
    real, padded = sum(s["tokens"] for s in steps), sum(s["padded_tokens"] for s in steps)
    assert drawn == 64
    assert tab.text("#saved").split() == [f"{100 * (1 - real / padded):.0f}", "%"]
    heights = tab.page.eval_on_selector_all(
        "#chart .column:last-child rect", "all => all.map(r => +r.getAttribute('height'))"
    )
    if len(heights) == 3:  # the slot, the padding above, the tokens
        assert heights[2] / heights[1] == pytest.approx(
            steps[-1]["tokens"] / steps[-1]["padded_tokens"], abs=0.02
        )
    assert tab.text("#state") == "live" and tab.text("#uptime") == "up 1 h 10 min"
    assert tab.text("#requests-rate") == "95" and tab.text("#tokens-rate") == "8,570"
    assert [tab.text(f"#queue-{x}") for x in ("requests", "tokens", "running")] == [
        "3",
        "412",
        "17",
    ]
    assert tab.text("#latency").split() == ["p50", "41", "ms", "p95", "96", "ms", "p99", "1.5", "s"]
    assert "22.7M" in tab.text("#models") and "256 tokens" in tab.text("#models")
    assert "12.1M" in tab.text("#totals") and "1.5M (20 %)" in tab.text("#totals")
    rows = [row.split() for row in tab.page.locator("#routes-body tr").all_inner_texts()]
    assert rows[0] == ["/embed", "9,000", "40", "ms", "90", "ms", "1.2", "s"]
    assert "<b>news</b>" in tab.text("#models")  # a name is text
    assert lowest_contrast(tab) >= 4.5  # WCAG 2.2, 1.4.3
    assert tab.complaints == []


@needs_chromium
def test_arrow_keys_read_the_batches_and_a_table_says_the_same(tab: Tab, server: StandIn) -> None:
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#chart .column")
    newest = stats(80)["steps"][-1]
    tab.page.focus("#chart")
    tab.page.keyboard.press("ArrowLeft")
    note = tab.text("#chart-note")
    assert note.startswith(f"Newest batch: {newest['sequences']} sequences")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.text("#chart-note").startswith("2nd newest batch")
    tab.page.keyboard.press("Escape")
    tab.page.click("#steps summary")
    row = tab.page.locator("#steps-body tr").first.inner_text().replace(",", "").split()
    assert row[:4] == [
        "newest",
        *(str(newest[k]) for k in ("sequences", "tokens", "padded_tokens")),
    ]
    assert tab.complaints == []


@needs_chromium
def test_before_the_first_batch_it_says_so(tab: Tab, server: StandIn) -> None:
    server.answers["/stats.json"] = (200, stats(0))
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#main")
    assert "No batch has run yet" in tab.text("#saved-text")
    assert not tab.page.is_visible("#saved") and not tab.page.is_visible("#steps")
    assert tab.complaints == []


@needs_chromium
def test_a_server_that_fails_is_said_and_the_last_numbers_stay(tab: Tab, server: StandIn) -> None:
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#chart .column")
    server.answers["/stats.json"] = (503, {"error": "draining", "error_type": "unhealthy"})
    tab.page.evaluate("refresh()")
    tab.page.wait_for_selector("#trouble")
    assert "503: draining" in tab.text("#trouble") and tab.text("#state") == "no answer"
    assert tab.text("#tokens-rate") == "8,570"
    server.answers["/stats.json"] = (200, stats(80))
    tab.page.evaluate("refresh()")
    tab.page.wait_for_selector("#trouble", state="hidden")
    assert tab.text("#state") == "live"


@needs_chromium
def test_a_key_is_asked_for_and_forgotten_with_the_page(tab: Tab, server: StandIn) -> None:
    server.api_key = "secret"
    tab.page.goto(server.url)
    for key, shown in (("wrong", "#key-error:not(:empty)"), ("secret", "#chart .column")):
        tab.page.fill("#key", key)
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_selector(shown)
    assert not tab.page.is_visible("#key-form") and tab.page.input_value("#key") == ""
    kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    assert tab.page.evaluate(kept) == '[{},{},""]'
    tab.page.reload()
    tab.page.wait_for_selector("#key-form")
    assert not tab.page.is_visible("#main")


@needs_chromium
@pytest.mark.parametrize(
    ("model", "route", "answer", "sent", "shown"),
    [
        ("all-MiniLM-L6-v2", "/embed", VECTORS, {"inputs": [MARKUP, "b", "c"]}, ["0.960", "0.000"]),
        (
            "emotions",
            "/predict",
            [[{"label": MARKUP, "score": 0.75}, {"label": "sad", "score": 0.25}]],
            {"inputs": [[MARKUP, "b\nc"]]},
            [MARKUP, "0.750", "sad"],
        ),
        (
            "reranker",
            "/rerank",
            [{"index": 1, "score": 0.9}, {"index": 0, "score": 0.125}],
            {"query": MARKUP, "texts": ["b", "c"]},
            ["c\n0.900", "b\n0.125"],
        ),
        (
            "decider",
            "/v1/systemone",
            {"answers": {"asked": {"noul": 0.75}}},
            {"state": MARKUP, "questions": {"asked": {"type": "noul", "instructions": "b c"}}},
            ["yes\n0.750", "no\n0.250"],
        ),
        (
            "entities",
            "/predict_tokens",
            [[{"entity_group": "PER", "score": 0.5, "word": "img", "start": 1, "end": 4}]],
            {"inputs": [MARKUP], "aggregation_strategy": "simple"},
            ["1 span", "PER 0.50", MARKUP[4:]],
        ),
        (
            "qwen3",
            "/v1/completions",
            'data: {"choices":[{"text":"Good "}]}\n\n'
            'data: {"choices":[{"text":"day","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
            {"prompt": MARKUP, "max_tokens": 64, "stream": True},
            ["Good day", "ended by: stop"],
        ),
    ],
)
def test_a_text_is_tried_by_the_route_of_its_task(
    tab: Tab,
    server: StandIn,
    model: str,
    route: str,
    answer: object,
    sent: dict[str, object],
    shown: list[str],
) -> None:
    server.answers[route] = (200, answer)
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#try")
    tab.page.select_option("#model", model)
    tab.page.fill("#first", MARKUP)
    if tab.page.is_visible("#second"):
        tab.page.fill("#second", "b c" if model == "decider" else "b\nc")
    tab.page.press("#first", "Control+Enter")
    tab.page.wait_for_selector(".tokens")
    assert (route, sent | {"model": model}) in server.seen
    result = tab.text("#result")
    assert all(part in result for part in shown), result
    assert "[CLS]" in result and "2 tokens" in result
    assert tab.complaints == []  # no dialog: MARKUP is text everywhere


@needs_chromium
def test_a_text_that_is_refused_shows_the_servers_reason(tab: Tab, server: StandIn) -> None:
    message = "inputs: 300 tokens, the model takes 256"
    server.answers["/embed"] = (422, {"error": message, "error_type": "validation"})
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#try")
    tab.page.click("#run")
    assert "this field is empty" in tab.text("#result")
    tab.page.fill("#first", "long")
    tab.page.click("#run")
    tab.page.wait_for_selector(f"text={message}")
    assert tab.page.is_enabled("#run")


@needs_chromium
@pytest.mark.parametrize("tab", ["light", "dark"], indirect=True)
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_phones_and_screens(tab: Tab, server: StandIn, width: int, tmp_path: Path) -> None:
    """A screenshot of the whole page is beside the test's other files."""
    server.answers["/v1/systemone"] = (200, {"answers": {"asked": CHANCES}})
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#chart .column")
    tab.page.select_option("#model", "decider")
    tab.page.fill("#first", "W" * 200)
    tab.page.fill("#second", f"Who?\n{'a' * 99}\n{MARKUP}")
    tab.page.click("#run")
    tab.page.wait_for_selector(".scores")
    tab.page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == width
    assert tab.complaints == []


@needs_chromium
def test_a_server_without_models_is_loading_them(tab: Tab, server: StandIn) -> None:
    server.answers["/stats.json"] = (200, stats(0) | {"models": [], "routes": []})
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#main")
    assert tab.text("#state") == "loading models" and not tab.page.is_visible("#routes")
    assert tab.complaints == []


@needs_chromium
def test_tables_are_read_on_a_phone_without_scrolling_sideways(tab: Tab, server: StandIn) -> None:
    """Names of models are as long as those of the hub; no text lies outside of the screen."""
    answer = stats(80)
    answer["models"][0]["name"] = "sentence-transformers/paraphrase-multilingual-mpnet-base-v2"
    server.answers["/stats.json"] = (200, answer)
    tab.page.set_viewport_size({"width": 360, "height": 800})
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#chart .column")
    tab.page.click("summary")
    right = """all => Math.max(...all.map(e => {
        const range = document.createRange();
        range.selectNodeContents(e);
        return range.getBoundingClientRect().right;
    }))"""
    for cells in ("#models th, #models td", "#steps-body th, #steps-body td"):
        assert tab.page.eval_on_selector_all(cells, right) <= 360
    lines = """all => Math.max(...all.map(e => {
        const range = document.createRange();
        range.selectNodeContents(e);
        return range.getClientRects().length;
    }))"""
    assert tab.page.eval_on_selector_all("#steps-body td", lines) == 1  # no number is broken
    hidden = "all => Math.max(...all.map(e => e.scrollWidth - e.clientWidth))"
    assert tab.page.eval_on_selector_all(".scroll", hidden) == 0
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    shown = "e => getComputedStyle(e, '::before').content"
    heads = tab.page.eval_on_selector_all(
        ".models thead th", 'all => all.slice(1).map(e => `"${e.textContent}"`)'
    )
    cells = tab.page.locator("#models tr").first.locator("td").all()
    assert [cell.evaluate(shown) for cell in cells] == heads


@needs_chromium
def test_every_control_has_a_name(tab: Tab, server: StandIn) -> None:
    tab.page.goto(server.url)
    tab.page.wait_for_selector("#try")
    unnamed = """all => all.filter(e => e.checkVisibility() &&
        !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim())).length"""
    assert (
        tab.page.eval_on_selector_all("input, select, textarea, button, a, summary", unnamed) == 0
    )
    assert tab.page.get_attribute("#chart", "aria-label").startswith("The last 64 batches")


def lowest_contrast(tab: Tab) -> float:
    """The least contrast of a text that is seen to the background behind it."""
    return tab.page.evaluate(
        """() => {
          const channels = (css) => css.match(/[\\d.]+/g).map(Number);
          const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = (e) => {
            const own = channels(getComputedStyle(e).backgroundColor);
            return own.length === 3 || own[3] === 1 ? own : behind(e.parentElement);
          };
          const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          const found = [];
          for (let node; (node = walker.nextNode()); ) {
            const e = node.parentElement;
            if (!node.data.trim() || !e.checkVisibility() || e.closest('script')) continue;
            const style = getComputedStyle(e);
            const pair = [e.closest('#chart') ? style.fill : style.color].map(channels)
              .concat([behind(e)]).map(light).sort((a, b) => b - a);
            found.push((pair[0] + 0.05) / (pair[1] + 0.05));
          }
          return found.length ? Math.min(...found) : 0;
        }"""
    )
