"""Which gradients share a bucket, and what that costs: models of networks, a simulation, a choice, and a command.

| module | contents |
|---|---|
| `links` | what an all-reduce takes, from an algorithm and a network or from a fit to measurements |
| `measuring` | those measurements, on a process group |
| `simulation` | one backward pass and the transfers of its buckets |
| `assignment` | buckets filled up to a size |
| `choice` | the buckets that end backward soonest |
| `model_shapes`, `presets` | parameters of models, from files and by name |
| `prediction`, `plot`, `command` | `python -m cuda_ext.distributed plan` |

Only `measuring` uses torch. Nothing here uses the rest of `cuda_ext.distributed`.
"""
