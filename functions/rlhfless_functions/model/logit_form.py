"""The form of an architecture's logits after the product with the head's weights: their scale and soft bound."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class LogitForm:
    """The form of an architecture's logits, and how it acts on them and on gradients."""

    scale: float
    """Factor of the logits (Cohere; Granite divides)."""
    cap: float | None
    """Soft bound of the logits: cap · tanh(logits / cap) (Gemma 2)."""

    @classmethod
    def of(cls, causal: PreTrainedModel) -> "LogitForm":
        """Return the form that a model's configuration names."""
        config = causal.config.get_text_config()
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        cap: float | None = getattr(config, "final_logit_softcapping", None)
        return cls((1.0 if scale is None else scale) / (1.0 if divisor is None else divisor), cap)

    def scores(self, products: torch.Tensor, temperature: float) -> torch.Tensor:
        """Turn float32 products with the head's weights into logits divided by the temperature, in place."""
        if self.scale != 1:
            products.mul_(self.scale)
        if self.cap is not None:
            products.div_(self.cap).tanh_().mul_(self.cap)
        return products.div_(temperature) if temperature != 1 else products

    def slope(self, scores: torch.Tensor, temperature: float) -> torch.Tensor | None:
        """Return the derivative of the soft bound, computed from `scores`; None if there is no bound."""
        return None if self.cap is None else 1 - (scores * (temperature / self.cap)).square_()

    def to_products(self, gradient: torch.Tensor, slope: torch.Tensor | None, temperature: float) -> torch.Tensor:
        """Turn the gradient of `scores` into that of the products, in place."""
        if slope is not None:
            gradient.mul_(slope)
        return gradient.mul_(self.scale / temperature) if self.scale != temperature else gradient
