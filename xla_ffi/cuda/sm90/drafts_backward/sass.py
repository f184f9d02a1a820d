import re,sys
ev=[]; n=0; mx=0
for l in sys.stdin:
    m=re.search(r'/\*([0-9a-f]{4,})\*/\s+(.*?);',l)
    if not m:
        continue
    n+=1; t=m.group(2)
    for r in re.findall(r'\bR(\d+)\b',t): mx=max(mx,int(r))
    if 'HGMMA' in t: ev.append('H')
    elif 'STL' in t: ev.append('s')
    elif 'LDL' in t: ev.append('l')
    elif 'USETMAXREG' in t: ev.append('|'+str(mx)+':'+t.split()[-1]+'|'); mx=0
    elif 'BAR.SYNC' in t: ev.append('B')
    elif 'SYNCS' in t and 'TRYWAIT' in t: ev.append('w')
    elif 'WARPGROUP.DEPBAR' in t: ev.append('D'+t.split()[-1])
s=''.join(ev)
for ch in 'Hsl': s=re.sub(ch+'+',lambda m:f'{ch}{len(m.group(0))} ',s)
print(n,'last max R',mx,'\n ',s)
