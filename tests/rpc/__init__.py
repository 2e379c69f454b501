"""Tests of baton.rpc."""
