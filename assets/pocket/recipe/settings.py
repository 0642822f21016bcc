"""Everything that decides what the pair becomes: shapes, the corpus's sources, the training budget."""

from dataclasses import dataclass, field

VOCABULARY = 4096
CONTEXT = 2048
END_OF_TEXT = "<|endoftext|>"

# Chosen by how they read. Tests, vendored copies, generated code and tables are left out by `corpus.is_prose_like`.
PACKAGES = (
    "networkx", "huggingface_hub", "rich", "click", "httpx", "fastapi", "starlette", "jinja2", "pydantic", "typer",
    "tqdm", "anyio", "packaging", "fsspec", "filelock", "h11", "tomlkit", "gradio", "gradio_client", "markdown_it",
    "uvicorn", "dateutil", "httpcore", "yaml",
)  # fmt: skip

# Of large packages only the parts that read well; paths are relative to site-packages.
PARTS = (
    "torch/nn", "torch/optim", "torch/distributions", "torch/utils/data", "torch/hub.py", "torch/serialization.py",
    "numpy/lib", "numpy/polynomial", "numpy/linalg", "transformers/generation", "transformers/utils",
    "transformers/data", "transformers/pipelines", "transformers/trainer_utils.py", "transformers/cache_utils.py",
    "transformers/trainer_callback.py", "transformers/configuration_utils.py", "transformers/activations.py",
    "transformers/optimization.py",
)  # fmt: skip

# Whole packages the models never see, so that nothing measured on them can be recall.
HELD_OUT_PACKAGES = ("uvicorn", "h11", "markdown_it", "dateutil")

SKIPPED_FOLDERS = frozenset(
    [
        "test",
        "tests",
        "testing",
        "_testing",
        "idlelib",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "site-packages",
        "distutils",
        "turtledemo",
        "vendor",
        "_vendor",
        "_vendored",
        "_click",
        "templates",
        "__pycache__",
        "ensurepip",
        "generated",
        "_generated",
        "quantized",
        "tkinter",
        "msilib",
        "macholib",
        "v1",
        "deprecated",
    ]
)


@dataclass(frozen=True)
class Shape:
    """One llama: `heads` query heads of 64, `kv_heads` key/value heads, a gated MLP of `mlp`."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = VOCABULARY
    context: int = CONTEXT
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class Recipe:
    """The pair and how it is trained. Token counts are training tokens of the joint phase."""

    target: Shape = Shape(width=384, layers=16, heads=6, kv_heads=2, mlp=1024)
    drafts: dict[str, Shape] = field(
        default_factory=lambda: {
            "draft1": Shape(width=256, layers=1, heads=4, kv_heads=2, mlp=768),
            "draft2": Shape(width=256, layers=2, heads=4, kv_heads=2, mlp=768),
        }
    )
    exit_layer: int = 4
    exit_weight: float = 0.3
    tokens: int = 15_000_000
    batch_tokens: int = 6144
    short_sequence: int = 256
    short_share: float = 0.4  # the first part of the budget, on short sequences, which cost less
    sequence: int = 512
    long_sequences: tuple[int, ...] = (1024, 2048)
    long_share: float = 0.15  # the last part of the budget, on long sequences
    decay_share: float = 0.25  # the last part of the budget, learning rate falling to zero
    quantise_share: float = 0.2  # the last part of the budget, trained through NF4 rounding
    warmup_tokens: int = 400_000
    muon_rate: float = 0.004
    adam_rate: float = 0.004
    weight_decay: float = 0.05
    finish_tokens: int = 2_000_000  # of the draft-only phase
    finish_rate: float = 0.5  # of the joint phase's rates
    sampled_texts: int = 1536  # written by the target for the draft to learn from
    sampled_prompt: int = 48
    sampled_length: int = 257
    seed: int = 20
    evaluate_every: int = 100  # steps
    held_out_windows: int = 32
    checkpoint_seconds: float = 300.0
