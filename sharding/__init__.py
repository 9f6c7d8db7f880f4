"""Planning of shardings from calibrated cost models (imported as ``torchrec_bls.sharding``)."""
