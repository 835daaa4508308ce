"""The status page of a running server: every task of every model, tried in headless Chromium."""

import re
import shutil

import pytest
from serving import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]

# What the result shows beside the tokens, by the page's name of the task.
SHOWN = {
    "Embed": r"Vector of 48 dimensions.*Cosine similarity",
    "Sparse": r"terms?, the heaviest first",
    "Token vectors": r"vectors of 48 dimensions",
    "Classify": r"LABEL_0",
    "Rerank": r"Best first",
    "Entities": r"spans?",
    "Decide": r"Probabilities",
    "Generate": r"ended by: (length|stop)",
    "Chat": r"ended by: (length|stop)",
}


@pytest.mark.feature("Server", "status page")
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")
def test_every_task_of_every_model_can_be_tried(server: Server) -> None:
    complaints: list[str] = []
    tried: set[str] = set()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page()
        page.set_default_timeout(30_000)
        page.goto(server.url)
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#try")
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for model in page.locator("#model option").all_inner_texts():
            page.select_option("#model", model)
            for task in page.locator("#task option").all_inner_texts():
                page.select_option("#task", label=task)
                page.fill("#first", "New York is big")
                if page.is_visible("#second"):
                    page.fill("#second", "a\nthe quick brown fox\na lazy dog")
                if page.is_visible("#max-tokens"):
                    page.fill("#max-tokens", "4")
                page.click("#run")
                page.wait_for_selector("#run:enabled")
                result = page.inner_text("#result").replace("\n", " ")
                assert re.search(SHOWN[task], result), f"{model}, {task}: {result}"
                assert re.search(r"^\d+ tokens", result), f"{model}, {task}: {result}"
                tried.add(task)
        page.wait_for_selector("#chart .column")
        saved = page.inner_text("#saved-text")
        browser.close()
    assert complaints == []
    assert {"Embed", "Sparse", "Classify", "Rerank", "Entities", "Decide", "Generate"} <= tried
    assert "fewer tokens computed" in saved
