"""The processes of a service: who starts whom, and what becomes of the others when one dies.

docs/design/service-processes.md has the picture.
"""
