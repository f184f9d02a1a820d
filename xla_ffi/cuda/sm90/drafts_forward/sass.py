import subprocess,sys,re
obj,pat=sys.argv[1],sys.argv[2] if len(sys.argv)>2 else ''
txt=subprocess.run(['cuobjdump','-sass',obj],capture_output=True,text=True).stdout
for part in txt.split('Function : ')[1:]:
    name=part.split('\n')[0]
    if pat and not re.search(pat,name): continue
    lines=[l for l in part.split('\n') if re.search(r'/\*[0-9a-f]{4,5}\*/\s+\S',l)]
    ins=[re.sub(r'\s+',' ',re.search(r'/\*([0-9a-f]{4,5})\*/\s+(.*?);',l).group(2)) for l in lines if ';' in l]
    ev=[]; prev=None
    for i,s in enumerate(ins):
        m=re.search(r'\b(STL|LDL|HGMMA|WARPGROUP\.\w+|USETMAXREG\S*|BAR\.\S+|SYNCS\S*|UTMALDG\S*|EXIT|BRA|CALL\S*|WARPSYNC\S*|MUFU\.EX2)\b.*',s)
        if m:
            k=s.split()[0] if not s.startswith('@') else s.split()[1]
            if k==prev: ev[-1][2]+=1
            else: ev.append([i,s[:70],1]); prev=k
    print(name,len(ins))
    for e in ev: print(e[0],e[1],'x%d'%e[2] if e[2]>1 else '')
