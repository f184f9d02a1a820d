import re,sys
for f in sys.argv[1:]:
    s=open(f).read()
    for m in re.finditer(r"Compiling entry function '(\S+)'.*?\n.*?\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers",s,re.S):
        n=m.group(1); k=re.search(r'Li(\d+).*?sm80\d+(\w+?_mask).*?\d(\w+?_bias)E',n)
        print(f, ' '.join(k.groups()) if k else n[:60], 'stack',m.group(2),'st',m.group(3),'ld',m.group(4),'regs',m.group(5))
    print([l for l in s.splitlines() if 'warning' in l.lower() or 'error' in l.lower()][:8])
