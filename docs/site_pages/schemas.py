"""JSON schemas: of an experiment, and of what `remanence list --json` prints."""

from __future__ import annotations

from typing import Any

from remanence.config import Experiment

ENTRY = {
    "type": "object",
    "required": ["name", "call", "options", "description"],
    "properties": {
        "name": {"type": "string", "description": "Name of the entry."},
        "call": {"type": "string", "description": "The entry with all options, as users write it."},
        "options": {
            "type": "object",
            "description": "Options with their defaults; null: required, or none.",
            "additionalProperties": {
                "type": ["boolean", "number", "string", "null", "array"],
            },
        },
        "description": {"type": "string", "description": "What the entry is, in plain text."},
        "payload": {
            "type": "string",
            "description": "What clients send besides the model; only for parts of methods.",
        },
        "needs_public_data": {
            "type": "boolean",
            "description": "Whether the server needs public examples; only for parts of methods.",
        },
    },
    "additionalProperties": False,
}
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, dict[str, Any]]:
    """The schemas by file name."""
    experiment = Experiment.model_json_schema()
    entries = {"title": "remanence list TABLE --json", "type": "array", "items": ENTRY}
    return {
        "experiment.schema.json": {"$schema": DRAFT} | experiment,
        "list.schema.json": {"$schema": DRAFT} | entries,
    }
