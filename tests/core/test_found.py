"""Models of other programs on this machine, found where those keep them, in a home folder made up for the test."""

import json

import pytest
from huggingface_hub import constants
from written_gguf import write_gguf

from core.inspecting.catalogue import found_here
from core.inspecting.files import preview


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.delenv("LLAMA_CACHE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def put(home):
    def write(path):
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(file)
        return file

    return write


def test_nothing_is_there(home):
    assert found_here() == []
    assert list(home.iterdir()) == [], "looking leaves nothing behind"


@pytest.mark.parametrize(
    "path, place, label",
    [
        (".lmstudio/models/owner/Tiny-GGUF/tiny.Q4_0.gguf", "LM Studio", "tiny.Q4_0.gguf"),
        (".cache/llama.cpp/owner_tiny.gguf", "llama.cpp", "owner_tiny.gguf"),
        ("hub/models--owner--tiny-GGUF/snapshots/abc/tiny.gguf", "Hugging Face", "owner/tiny-GGUF: tiny.gguf"),
    ],
)
def test_files_at_the_usual_places(put, path, place, label):
    file = put(path)
    (found,) = found_here()
    assert (found.label, found.name, found.place) == (label, str(file), place)
    assert found.bytes == file.stat().st_size
    assert preview(found.name).cached


def test_ollama_calls_its_files_by_their_digest(put, home):
    blob = put(".ollama/models/blobs/sha256-0123")
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:99", "size": 3},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0123", "size": 3},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    (found,) = found_here()
    assert (found.label, found.name, found.place) == ("tiny:latest", str(blob), "Ollama")
    assert preview(found.name).origin == "F16"


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[]",
        '{"layers": 3}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:gone"}]}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../secret"}]}',
    ],
)
def test_a_manifest_that_cannot_be_followed(put, home, content):
    put(".ollama/secret")
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content)
    assert found_here() == []


def test_parts_and_projectors_are_left_out(put, home):
    for name in ("a-00002-of-00003.gguf", "mmproj-tiny.gguf"):
        put(f".cache/llama.cpp/{name}")
    (home / ".cache/llama.cpp/vocabulary.gguf").write_bytes(b"GGUF")
    assert found_here() == []
