#!/usr/bin/env bash
# Written by `make pins` from envs/flame.txt, which says why: change that file instead.
python -m pip install --no-deps --no-build-isolation \
  'flame @ git+https://github.com/fla-org/flame@e11e7be75b9e45e84dbecbe8f0efa27d6af7d101' \
  'torchtitan @ git+https://github.com/pytorch/torchtitan@0b44d4c437c424b6bf719661c0eb4283dc4068bc' \
  blobfile==3.3.0 \
  docstring_parser==0.18.0 \
  grpcio==1.85.1 \
  Markdown==3.11.3 \
  protobuf==7.36.2 \
  pycryptodomex==3.24.2 \
  tensorboard==2.21.0 \
  tensorboard-data-server==0.7.2 \
  tiktoken==0.14.0 \
  tomli==2.5.0 \
  torchdata==0.11.0 \
  tyro==1.0.16 \
  Werkzeug==3.1.9
