"""For each kernel of the objects given: no spills in the loop of the consumers, and the exponentials of the loop before the wait for p v."""
import re, subprocess, sys
bad = 0
for obj in sys.argv[1:]:
    txt = subprocess.run(['cuobjdump', '-sass', obj], capture_output=True, text=True).stdout
    for part in txt.split('Function : ')[1:]:
        name = part.split('\n')[0]
        if 'jax_dma_sm90_forward' not in name: continue
        ins = [m.group(1) for m in re.finditer(r'/\*[0-9a-f]{4,5}\*/\s+(.*?);', part)]
        a = next(i for i, s in enumerate(ins) if 'TRY_ALLOC' in s); z = next(i for i, s in enumerate(ins) if 'DEALLOC' in s)
        con = ins[a:z] if a < z else ins[a:]
        w1 = next(i for i, s in enumerate(con) if 'DEPBAR.LE gsb0, 0x1' in s)
        w0 = next(i for i in range(w1, len(con)) if 'DEPBAR.LE gsb0, 0x0' in con[i])
        nxt = next((i for i in range(w0, len(con)) if 'HGMMA' in con[i]), len(con))
        first = next(i for i, s in enumerate(con) if 'DEPBAR' in s); loop = next(i for i in range(first, w1) if 'HGMMA' in con[i])
        spill = lambda c: [s for s in c if re.search(r'\b(STL|LDL)', s)]
        spills = spill(con[loop:w0])
        e = lambda x, y: sum('MUFU.EX2' in s for s in con[x:y])
        waits = sum('DEPBAR' in s for s in con)
        ok = not spills and e(w0, nxt) == 0 and waits == 4
        bad += not ok
        h = re.search(r'Li(\d+)', name).group(1)
        print('ok ' if ok else 'BAD', obj, h, re.search(r'(no_mask|interval_mask|dense_mask)', name).group(1), re.search(r'(no_bias|key_bias|tile_bias)', name).group(1),
              'spills in loop', len(spills), 'in consumers', len(spill(con)), 'ex2 before/after wait', e(w1, w0), e(w0, nxt), 'HGMMA', sum('HGMMA' in s for s in con), 'waits', waits, 'instructions', len(ins))
sys.exit(bad != 0)
