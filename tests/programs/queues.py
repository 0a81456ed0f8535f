"""The trivial program of a feed: a pair comes in, its sum and difference go out."""

import threading

import poptorch
import torch


def run(iterations):
    dataset = [(torch.ones(800), torch.ones(800))]
    infeed = poptorch.InfeedQueue(dataset, prefetch_depth=3, repeat=True)
    outfeed = poptorch.OutfeedQueue()
    newest = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)

    @poptorch.function
    def program():
        def body(count, x1, x2):
            outfeed.enqueue({"d1": x1 + x2, "d2": x1 - x2})
            newest.enqueue(count)
            return count + 1

        return poptorch.repeat(iterations, body, 0, infeed)

    seen = []
    watcher = threading.Thread(target=lambda: seen.extend(outfeed.follow()))
    count = program()
    result = outfeed.dequeue()
    watcher.start()
    program()
    watcher.join()
    return count, result, newest.dequeue(), seen


def main():
    count, result, last, seen = run(10)
    print("counter", int(count), "last", int(last))
    for name in ("d1", "d2"):
        print(name, list(result[name].shape), sorted(set(result[name].flatten().tolist())))
    print("followed", len(seen), list(seen[0]["d1"].shape))
    poptorch.dataset_benchmark(torch.ones(20, 256), 1, 20)


if __name__ == "__main__":
    main()
