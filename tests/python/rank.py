"""One rank of package_test.py: CHECKPOINT, libfusedmoe_mpi.so. Layers whose experts are spread and moved give the bits of one that
is not; prints 'rank-N-ok'."""

import os
import signal
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "python"))

import fusedmoe  # noqa: E402


def matrix(values, shape, code="f"):
    return memoryview(bytearray(struct.pack(f"<{len(values)}{code}", *values))).cast(code, shape)


def main():
    fusedmoe.set_num_threads(1)
    checkpoint = fusedmoe.Checkpoint(sys.argv[1])
    number = checkpoint.moe_layers[-1]
    options = {"max_tokens": 16, "determinism": "rank_invariant"}
    ranks = fusedmoe.Communicator.mpi(sys.argv[2], deadline=30)
    assert ranks.size == 2
    layer = checkpoint.load_layer(number, communicator=ranks, dp=2, ep=True, eplb=True, redundant_experts=2,
                                  eplb_window=4, eplb_interval=4, **options)
    alone = checkpoint.load_layer(number, **options)
    tokens = 3 + ranks.rank
    info = alone.info
    hidden = matrix([((i * 7919 + ranks.rank) % 1000 - 500) / 250 for i in range(tokens * info.hidden)],
                    [tokens, info.hidden])
    ids = matrix([info.num_experts - 1 if slot == 0 else -1 for _ in range(tokens) for slot in range(info.top_k)],
                 [tokens, info.top_k], "i")
    weights = matrix([1.0] * (tokens * info.top_k), [tokens, info.top_k])
    expected, output = (matrix([0.0] * (tokens * info.hidden), [tokens, info.hidden]) for _ in range(2))
    alone(hidden, topk_ids=ids, topk_weights=weights, out=expected)
    switched = 0
    before = layer.physical_to_logical
    for _ in range(6):
        layer(hidden, topk_ids=ids, topk_weights=weights, out=output)
        assert bytes(output) == bytes(expected), "the bits of one rank"
        step = layer.end_step()
        assert step.kept == "", step.kept
        switched += step.switched
    assert switched >= 1 and layer.physical_to_logical != before, (switched, layer.physical_to_logical)
    # What one rank does wrong, all are told, and all go on.
    try:
        layer(hidden, topk_ids=matrix([99] * (tokens * info.top_k), [tokens, info.top_k], "i") if ranks.rank else ids,
              topk_weights=weights, out=output)
        raise AssertionError("rank 1 brought an expert that no layer has")
    except fusedmoe.Error as error:
        assert "is 99" in str(error), error
    layer(hidden, topk_ids=ids, topk_weights=weights, out=output)
    assert bytes(output) == bytes(expected)
    # A child that is forked from a rank is none: its end waits for no other.
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        return
    assert os.waitpid(child, 0)[1] == 0
    sys.stdout.write(f"rank-{ranks.rank}-ok\n")


main()
