"""What the engine and the command line write can be opened on the page: every method, greedy and drawn."""

import json

import pytest

from app.history.run_file import read_run_file
from core.drafting.methods import METHODS
from core.lanes import open_lane
from core.settings import Settings

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "method", [name for name in METHODS if METHODS[name].network != "head"]
)  # the pair has no head
def test_a_run_document_is_opened_unchanged(pair, method, temperature):
    settings = Settings(method=method, temperature=temperature, max_new_tokens=24, draft_length=4)
    with open_lane(pair, PROMPT, settings, tops=3) as lane:
        for _ in lane:
            pass
    document = json.loads(json.dumps(lane.run.to_dict()))
    for written in (document, {"schema": 1, "runs": [document, document]}):
        for opened in read_run_file(json.dumps(written)):
            assert opened.to_dict() == document
