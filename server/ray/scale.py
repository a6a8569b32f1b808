"""How many processes a deployment has, and what each reserves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Scale(BaseModel):
    """The size of a deployment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: int = Field(1, ge=1, description="Model replicas; the fewest if max_replicas is set.")
    max_replicas: int | None = Field(
        None, ge=1, description="The most model replicas: their number follows the load. null keeps it at replicas."
    )
    ingress_replicas: int = Field(1, ge=1, description="Ingress processes.")
    cpus: float = Field(1.0, ge=0, description="Cores that a model replica reserves.")
    gpus: float = Field(0.0, ge=0, description="GPUs that a model replica reserves.")
    ingress_cpus: float = Field(1.0, ge=0, description="Cores that an ingress reserves.")

    @property
    def reserved_cpus(self) -> float:
        """Cores of the fewest replicas and of the ingresses."""
        return self.replicas * self.cpus + self.ingress_replicas * self.ingress_cpus

    @property
    def reserved_gpus(self) -> float:
        return self.replicas * self.gpus

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Scale:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError("max_replicas must be at least replicas")
        return self
