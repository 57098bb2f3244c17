"""Training faults seen in public, rebuilt small, each with a healthy twin; and healthy set-ups that look faulty."""

from cases import backward, data, forward, loss, reproduce, right, update
from cases.registry import CASES, HEALTHY, Case, Healthy

__all__ = ["CASES", "HEALTHY", "Case", "Healthy", "backward", "data", "forward", "loss", "reproduce", "right", "update"]
