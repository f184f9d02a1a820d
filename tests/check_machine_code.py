"""Looks through a CUDA module's machine code: ``python tests/check_machine_code.py MODULE.so``.

For what no test can be relied on to show, in the Hopper kernels:

* A stage of shared memory that is given back before what was loaded from it is there. ptxas may place the arrival on
  the barrier before the first use of a load's result, that is, before anything has waited for the load; then the next
  tile may overwrite what is still to be read. The source makes such arrivals depend on the loads (``release_read`` in
  ``sm90/forward.cuh``).
* Registers that are spilled inside the loop of products. They are counted, but no error: some rare instances have them.
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


def spills_in_loop(instructions):
    """(stores, reloads) of the shortest loop that has most of the kernel's wgmma products; None without one."""
    index = {address: i for i, (address, _, _) in enumerate(instructions)}
    products = [i for i, (_, operation, _) in enumerate(instructions) if operation.startswith("HGMMA")]
    loops = []
    for i, (address, operation, operands) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", operands) if operation.startswith("BRA") else None
        first = index.get(int(target[1], 16)) if target and int(target[1], 16) < address else None
        if first is not None and sum(first <= p <= i for p in products) > len(products) / 2:
            loops.append((i - first, first, i))
    if not loops:
        return None
    _, first, last = min(loops)
    operations = [operation for _, operation, _ in instructions[first:last]]
    return tuple(sum(o.startswith(kind) for o in operations) for kind in ("STL", "LDL"))


def main(module):
    count, early, spilled = 0, [], []
    for name, instructions in kernels(module):
        if not instructions:
            continue
        count += 1
        early += [(name, *at) for at in given_back_too_early(instructions)]
        spills = spills_in_loop(instructions)
        if spills and any(spills):
            spilled.append((sum(spills), name))
    print(
        f"    {count} Hopper kernels; {len(spilled)} spill in their loop, at most {max(spilled, default=(0,))[0]} words"
    )
    for name, load, arrival in early:
        print(f"    {name}: loaded at {load:#x}, given back at {arrival:#x} before it is used")
    if early or not count:
        raise SystemExit(f"==> FAILED: {len(early)} loads" if early else "==> FAILED: no kernels of sm90 in the module")


if __name__ == "__main__":
    main(sys.argv[1])
