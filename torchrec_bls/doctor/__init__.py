"""The doctor: what a host has for the channel. Only the processes of the self-test import torch or
the rest of the package: the doctor has to work where these don't."""
