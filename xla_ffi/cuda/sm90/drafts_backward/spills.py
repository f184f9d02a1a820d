# spills.py file.o: where kernels spill, by source line
import subprocess,sys,re,collections,os,glob,tempfile
o=os.path.abspath(sys.argv[1]); d=tempfile.mkdtemp(); subprocess.run(['cuobjdump','-xelf','all',o],cwd=d,stdout=subprocess.DEVNULL)
for c in glob.glob(d+'/*.cubin'):
    t=subprocess.run(['nvdisasm','-g','-c',c],capture_output=True,text=True).stdout
    fn=None; line=None; res=collections.OrderedDict()
    for l in t.splitlines():
        m=re.match(r'\s*\.section\s+\.text\.(\S+?),',l) or re.match(r'^\.text\.(\S+):',l)
        if m: fn=m.group(1); res.setdefault(fn,collections.Counter())
        m=re.search(r'//## File "([^"]+)", line (\d+)(.*)',l)
        if m:
            f=os.path.basename(m.group(1)); line=f+':'+m.group(2)
            m2=re.search(r'inlined at "([^"]+)", line (\d+)',m.group(3))
            if m2 : line+='<'+os.path.basename(m2.group(1))+':'+m2.group(2)
        if fn and re.search(r'\b(STL|LDL)',l): res[fn][('ST ' if 'STL' in l else 'LD ')+str(line)]+=1
    for fn,r in res.items():
        if not r: continue
        m=re.search(r'Li(\d+).*?sm80\d+(\w+_mask).*?\d(\w+?_bias)',fn)
        print(m.group(1,2,3) if m else fn[:80], sum(r.values()))
        for k,v in sorted(r.items(),key=lambda a:-a[1])[:40]: print('   ',v,k)
