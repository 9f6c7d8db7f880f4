"""Damaged and hostile files, for each reader of untrusted bytes."""
