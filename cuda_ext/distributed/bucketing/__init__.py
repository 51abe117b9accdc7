"""Which gradients share a bucket: the cost of an all-reduce, a simulation of backward, and a choice.

| module | contents |
|---|---|
| `links` | what an all-reduce takes, from an algorithm and a network or from a fit to measurements |
| `measuring` | those measurements, on a process group |
| `simulation` | one backward pass and the transfers of its buckets |
| `assignment` | buckets filled up to a size |
| `choice` | the buckets that end backward soonest |

Only `measuring` uses torch. Nothing here uses the rest of `cuda_ext.distributed`.
"""
