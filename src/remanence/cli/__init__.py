"""The command `remanence`. Thin: flags in, sentences out."""
