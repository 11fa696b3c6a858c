import torch,time,sys,functools
sys.path.insert(0,sys.argv[1])
torch.set_num_threads(int(__import__("os").environ.get("NT","2")))
import nearfield as nf
from nearfield import synthetic
from nearfield.kernels import cells_cpu,cells_far,cells_engine,cells_head,cells_cpu_backward as cb
import nearfield.partition.cells as pc
acc={}
def wrap(mod,name,label=None):
    f=getattr(mod,name)
    @functools.wraps(f)
    def g(*a,**k):
        t=time.perf_counter(); r=f(*a,**k); acc[label or name]=acc.get(label or name,0)+time.perf_counter()-t; return r
    setattr(mod,name,g)
wrap(cells_engine,'assign'); wrap(cells_head,'tabulate'); wrap(cells_cpu,'near'); wrap(cells_cpu,'_local'); wrap(cells_far.Far,'run','far'); wrap(cells_far,'choose'); wrap(cells_far,'moments');wrap(cells_far,'masses')
for x in ('_dense_cells','_children','_local','_near'): wrap(cb,x,'b'+x)
wrap(pc.TableGradient,'spread_')
n=int(sys.argv[2]); causal=sys.argv[3]=='c'; bwd=sys.argv[4]=='b'
q,k,v=synthetic.make('clustered',1,1,n,64)
if bwd: q.requires_grad_(); k.requires_grad_(); v.requires_grad_()
S=torch.nn.functional.scaled_dot_product_attention
def once(f):
    t=time.perf_counter(); o=f(); 
    if bwd: o.sum().backward()
    return time.perf_counter()-t
for spec in sys.argv[5:]:
    if spec=='sdpa':
        print('sdpa',[round(once(lambda:S(q,k,v,is_causal=causal)),2) for _ in range(2 if n<40000 else 1)],flush=True); continue
    kw=eval(f'dict({spec})')
    m=nf.Cells(**kw)
    for _ in range(2):
        acc.clear(); t=once(lambda:nf.attention(q,k,v,is_causal=causal,method=m))
    acc2=dict(acc)
    with torch.no_grad(): e=nf.estimate(q,k,v,is_causal=causal,method=m,audit=200)
    print(spec,round(t,3),{a:round(b,3) for a,b in acc2.items()},'err mean rel',round(e.audit.relative_errors.mean().item(),4),'keys',round(e.info['keys_per_query']),flush=True)
