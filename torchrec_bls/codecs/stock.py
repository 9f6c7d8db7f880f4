"""The former name of `torchrec_bls.codecs.torchrec_codecs`."""

from functools import partial

from torchrec_bls._deprecated import old_name

__getattr__ = partial(old_name, __name__)
