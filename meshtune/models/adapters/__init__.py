"""Adapters: small trained matrices beside frozen weights, by PEFT's own layers and in PEFT's own files."""
