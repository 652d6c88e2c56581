"""`ray-artifact-sync demo`: the same experiment on Ray alone and with this library, killed and counted.

- `scenarios`: what happens to each trial, and what must be in storage afterwards. Pure.
- `counting`: what was found against what was expected. Pure.
- `experiment`: the trainable, and one run of it on real Ray.
- `local_s3`: an S3 server on 127.0.0.1.
- `table`, `command`: what people see.
"""
