"""Prompts to target answers, to the target's signal, to a trained drafter. Imports only `pairing`."""
