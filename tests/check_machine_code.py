"""Looks through a CUDA module's machine code: ``python tests/check_machine_code.py MODULE.so``.

For what no test can be relied on to show, in the Hopper kernels:

* A stage of shared memory that is given back before what was loaded from it is there. ptxas may place the arrival on
  the barrier before the first use of a load's result, that is, before anything has waited for the load; then the next
  tile may overwrite what is still to be read. The source makes such arrivals depend on the loads (``release_read`` in
  ``sm90/forward.cuh``).
* Registers that are spilled in the loops of products. They are counted, but no error: some rare instances have them.
"""

import re
import shutil
import subprocess
import sys

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+ )?\s*(\S+)\s*(.*?);")
_WIDE_LOAD = {"LDSM": 4, "LDS.128": 4, "LDS.64": 2}  # registers
_LIMIT = 400  # instructions from a load to its first use, at most


def kernels(module):
    """(name, [(address, operation, operands)]) of each kernel, one after another: the text is some 800 MB long."""
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        raise SystemExit("no cuobjdump: it is part of the CUDA toolkit, and of PyPI's nvidia-cuda-cuobjdump")
    process = subprocess.Popen([cuobjdump, "-sass", module], stdout=subprocess.PIPE, text=True)
    name, instructions = None, []
    for line in process.stdout:
        if "Function : " in line:
            if name:
                yield name, instructions
            name, instructions = line.split("Function : ")[1].strip(), []
        elif "sm90" in (name or ""):
            match = _INSTRUCTION.match(line)
            if match:
                instructions.append((int(match[1], 16), match[2], match[3]))
    if name:
        yield name, instructions
    if process.wait() != 0:
        raise SystemExit(f"{cuobjdump} failed on {module}")


def given_back_too_early(instructions):
    """Addresses (of a load, of an arrival) between which nothing uses what was loaded."""
    found = []
    for i, (address, operation, operands) in enumerate(instructions):
        count = next((n for load, n in _WIDE_LOAD.items() if operation.startswith(load)), 0)
        target = re.match(r"R(\d+),", operands)
        if not count or not target:
            continue
        loaded = {int(target[1]) + k for k in range(count)}
        for later, operation, operands in instructions[i + 1 : i + _LIMIT]:
            _, _, sources = operands.partition(",")
            if loaded & {int(r) for r in re.findall(r"\bR(\d+)\b", sources)}:
                break
            if operation.startswith("SYNCS.ARRIVE"):
                found.append((address, later))
                break
            if operation.startswith(("BRA", "EXIT", "RET")):
                break
    return found


def spills_in_loops(instructions):
    """(stores, reloads) in the innermost loops that have wgmma products.

    What stands behind the last EXIT closes no loop: it waits, and jumps back when it is done.
    """
    end = max((i for i, (_, operation, _) in enumerate(instructions) if operation == "EXIT"), default=0)
    index = {address: i for i, (address, _, _) in enumerate(instructions)}
    products = [i for i, (_, operation, _) in enumerate(instructions) if operation.startswith("HGMMA")]
    stretches = []
    for last, (address, operation, operands) in enumerate(instructions[:end]):
        target = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
        first = index.get(int(target[1], 16)) if target and int(target[1], 16) < address else None
        if first is not None and sum(first <= p <= last for p in products) >= 4:
            stretches.append((last - first, first, last))
    loops = []
    for _, first, last in sorted(stretches):
        if all(last < other_first or other_last < first for other_first, other_last in loops):
            loops.append((first, last))
    operations = [operation for first, last in loops for _, operation, _ in instructions[first:last]]
    return tuple(sum(o.startswith(kind) for o in operations) for kind in ("STL", "LDL"))


def main(module):
    count, early, spilled = 0, [], []
    for name, instructions in kernels(module):
        if not instructions:
            continue
        count += 1
        early += [(name, *at) for at in given_back_too_early(instructions)]
        spills = spills_in_loops(instructions)
        if any(spills):
            spilled.append((sum(spills), name))
    most = max(spilled, default=(0,))[0]
    print(f"    {count} Hopper kernels; {len(spilled)} spill in their loops, at most {most} words")
    for name, load, arrival in early:
        print(f"    {name}: loaded at {load:#x}, given back at {arrival:#x} before it is used")
    if early or not count:
        raise SystemExit(f"==> FAILED: {len(early)} loads" if early else "==> FAILED: no kernels of sm90 in the module")


if __name__ == "__main__":
    main(sys.argv[1])
