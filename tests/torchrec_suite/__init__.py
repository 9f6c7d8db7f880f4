"""TorchRec's own tests over the bounded-lag sharders: make test-torchrec TORCHREC=DIR.

TorchRec's wheel has no tests. So `DIR` is a checkout of the release branch of the TorchRec that is
installed. Its tests run twice: with TorchRec's own sharders over gloo, and with the bounded-lag
sharders in their places. A test that passes with the former must pass with the latter, unless a
page documents a refusal.
"""
