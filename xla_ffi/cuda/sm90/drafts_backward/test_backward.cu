// Standalone test of the Hopper backward kernels: a float64 oracle on small shapes, then times at workload A.
//   nvcc -O3 -std=c++17 -I$XLA/cuda/sm80 test_backward.cu backward_*.o -o test_backward    (see build_test.sh)
//   ./test_backward [check|time]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "../sm80/launch.h"
#include "../../common/problem.h"

namespace jax_dma::sm90 {
template <class T, int kHeadDim>
cudaError_t launch_backward(const Problem&, const sm80::BackwardBuffers&, cudaStream_t);
}
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using namespace jax_dma;
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)

static uint64_t state = 1;
static double uniform() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (state >> 40) / double(1 << 24); }
static bool quick = false;
static double normal() { if (quick) return 3.4 * uniform() - 1.7; double s = 0; for (int i = 0; i < 12; i++) s += uniform(); return s - 6; }

struct Case {
  const char* name;
  bool bf16; int B, T, S, N, K, H; bool causal;
  int mask = 0;       // 0 none, 1 bits with `mask_heads`, 2 intervals (K heads), 3 both
  int mask_heads = 0; // 1, K or N (as a number)
  int bias = 0;       // 0 none, 1 [B,h,T,S], 2 [B,h,1,S], 3 [1,h,T,S], 4 [1,h,1,S], 5 [B,h,T,1], 6 [1,1,1,1]
  int bias_heads = 0;
  DType bias_dtype = DType::kBF16;
  float softcap = 0; bool want_dbias = true; bool deterministic = false;
  double keep = 0.5;  // of mask bits
  int window = 0;     // intervals: width
  bool hostile = false; // NaN in the cotangent of rows that see nothing, NaN bias where hidden
};

static float get(const void* p, size_t i, DType d) {
  if (d == DType::kF32) return ((const float*)p)[i];
  if (d == DType::kBF16) return __bfloat162float(((const __nv_bfloat16*)p)[i]);
  return __half2float(((const __half*)p)[i]);
}
static void put(void* p, size_t i, float v, DType d) {
  if (d == DType::kF32) ((float*)p)[i] = v;
  else if (d == DType::kBF16) ((__nv_bfloat16*)p)[i] = __float2bfloat16(v);
  else ((__half*)p)[i] = __float2half(v);
}
static size_t size_of(DType d) { return d == DType::kF32 ? 4 : 2; }
struct Buffer {
  std::vector<char> host; void* device = nullptr; size_t bytes = 0;
  void* make(size_t n, bool on_host = true) { bytes = n; if (on_host) host.assign(n, 0); CK(cudaMalloc(&device, n ? n : 16)); return device; }
  void up() { CK(cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice)); }
  void down() { host.resize(bytes); CK(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost)); }
  ~Buffer() { if (device) cudaFree(device); }
};

static cudaError_t backward(const Problem& p, const sm80::BackwardBuffers& b) {
  const bool bf16 = p.dtype == DType::kBF16;
  if (p.H <= 64) return bf16 ? sm90::launch_backward<__nv_bfloat16, 64>(p, b, 0) : sm90::launch_backward<__half, 64>(p, b, 0);
  return bf16 ? sm90::launch_backward<__nv_bfloat16, 128>(p, b, 0) : sm90::launch_backward<__half, 128>(p, b, 0);
}

static double run(const Case& c, bool timing) {
  quick = timing; Problem p; const DType dt = c.bf16 ? DType::kBF16 : DType::kF16;
  const int G = c.N / c.K, H = c.H; const int64_t T = c.T, S = c.S; const int N = c.N, K = c.K, B = c.B;
  p.batch_rank = 1; p.batch_size[0] = B; p.B = B; p.T = T; p.S = S; p.N = N; p.K = K; p.G = G; p.H = p.Hv = H;
  const int queries = queries_per_tile(G); const int64_t qt = ceil_div(T, queries), kt = ceil_div(S, kKeyTile);
  p.query_tiles = qt; p.key_tiles = kt; p.scale = 1 / sqrtf(H); p.softcap = c.softcap; p.causal = c.causal; p.deterministic = c.deterministic; p.dtype = dt; p.bias_dtype = c.bias_dtype;
  const size_t nq = size_t(B) * T * N * H, nk = size_t(B) * S * K * H; const bool host = true;
  Buffer q, k, v, out, dout, lse, dlse, dq, dk, dv, bits, byq, byk, start, end, bounds, bias, dbias, stats, dqs, turn, sums;
  for (Buffer* x : {&q, &dout, &out, &dq}) x->make(nq * 2); for (Buffer* x : {&k, &v, &dk, &dv}) x->make(nk * 2);
  lse.make(size_t(B) * T * N * 4); dlse.make(size_t(B) * T * N * 4);
  for (size_t i = 0; i < nq; i++) put(q.host.data(), i, normal(), dt), put(dout.host.data(), i, normal(), dt);
  for (size_t i = 0; i < nk; i++) put(k.host.data(), i, normal(), dt), put(v.host.data(), i, normal(), dt);
  auto heads = [&](View& w, int h, int64_t stride) { w.kv = h == N ? G * stride : h == K ? stride : 0; w.group = h == N && G > 1 ? stride : 0; };
  auto qview = [&](View& w, Buffer& x, int channels) { w.data = x.device; w.batch[0] = B > 1 ? T * N * channels : 0; heads(w, N, channels); w.row = int64_t(N) * channels; w.col = 1; };
  auto kview = [&](View& w, Buffer& x) { w.data = x.device; w.batch[0] = B > 1 ? S * K * H : 0; w.kv = H; w.row = int64_t(K) * H; w.col = 1; };
  qview(p.q, q, H), qview(p.out, out, H), qview(p.dout, dout, H), qview(p.dq, dq, H), qview(p.lse, lse, 1), qview(p.dlse, dlse, 1);
  kview(p.k, k), kview(p.v, v), kview(p.dk, dk), kview(p.dv, dv);
  // mask
  std::vector<uint8_t> mask; const int mh = c.mask_heads; const bool has_bits = c.mask & 1, has_intervals = c.mask & 2;
  auto mask_at = [&](int b, int n, int64_t t, int64_t s) -> bool { const int h = mh == N ? n : mh == K ? n / G : 0; return mask[((size_t(b) * mh + h) * T + t) * S + s]; };
  if (has_bits) {
    mask.resize(size_t(B) * mh * T * S);
    for (size_t r = 0; r < size_t(B) * mh * T; r++) { const bool blank = !timing && r % 37 == 5; const double keep = c.keep;
      if (timing) { uint64_t x = r * 0x9E3779B97F4A7C15ull + 1; const uint64_t limit = uint64_t(keep * 65536); for (int64_t s = 0; s < S; s++) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; mask[r * S + s] = (x & 65535) < limit; } }
      else for (int64_t s = 0; s < S; s++) mask[r * S + s] = !blank && uniform() < keep && !((s / 128 + (r % T) / 32) % 3 == 1); }
    bits.make(size_t(B) * mh * T * kt * 16); p.bits.data = bits.device; p.bits.row = kt * 4; p.bits.col = 1; heads(p.bits, mh, T * kt * 4); p.bits.batch[0] = B > 1 ? mh * T * kt * 4 : 0;
    uint32_t* w = (uint32_t*)bits.host.data(); for (size_t r = 0; r < size_t(B) * mh * T; r++) for (int64_t s = 0; s < S; s++) if (mask[r * S + s]) w[r * kt * 4 + s / 32] |= 1u << s % 32;
    const int gh = mh == N ? K : mh, hg = mh == N ? G : 1; const int64_t kw = ceil_div(kt, 32), qw = ceil_div(qt, 32);
    byq.make(size_t(B) * gh * qt * 2 * kw * 4); byk.make(size_t(B) * gh * kt * 2 * qw * 4); uint32_t *a = (uint32_t*)byq.host.data(), *d = (uint32_t*)byk.host.data();
    for (int b = 0; b < B; b++) for (int g = 0; g < gh; g++) for (int64_t i = 0; i < qt; i++) for (int64_t j = 0; j < kt; j++) { bool seen = false, full = true;
      for (int h = g * hg; h < (g + 1) * hg; h++) for (int64_t t = i * queries; t < std::min<int64_t>(T, (i + 1) * queries); t++) for (int64_t s = j * 128; s < std::min<int64_t>(S, j * 128 + 128); s++) { const bool m = mask[((size_t(b) * mh + h) * T + t) * S + s]; seen |= m; full &= m; }
      const size_t bg = size_t(b) * gh + g; if (seen) a[((bg * qt + i) * 2) * kw + j / 32] |= 1u << j % 32, d[((bg * kt + j) * 2) * qw + i / 32] |= 1u << i % 32; if (full) a[((bg * qt + i) * 2 + 1) * kw + j / 32] |= 1u << j % 32, d[((bg * kt + j) * 2 + 1) * qw + i / 32] |= 1u << i % 32; }
    auto tv = [&](View& w, Buffer& x, int64_t n, int64_t words) { w.data = x.device; w.row = 2 * words; w.col = 1; const int64_t st = n * 2 * words; w.kv = gh == 1 && K > 1 ? 0 : st; w.batch[0] = B > 1 ? gh * st : 0; };
    tv(p.tiles_by_query, byq, qt, kw), tv(p.tiles_by_key, byk, kt, qw); p.tiles_by_query_plane = kw, p.tiles_by_key_plane = qw; bits.up(), byq.up(), byk.up();
  }
  std::vector<int32_t> is, ie;
  if (has_intervals) {
    start.make(size_t(B) * K * S * 4), end.make(size_t(B) * K * S * 4), bounds.make(size_t(B) * K * 4 * kt * 4); int32_t *a = (int32_t*)start.host.data(), *e = (int32_t*)end.host.data(), *bo = (int32_t*)bounds.host.data();
    for (size_t r = 0; r < size_t(B) * K; r++) { for (int64_t s = 0; s < S; s++) { const int64_t at = s - (S - T); int64_t x = at, y = at + (c.window ? c.window : 1 + int(uniform() * T)); if (!timing && s % 29 == 7) y = x; a[r * S + s] = std::min(T, std::max<int64_t>(0, x)); e[r * S + s] = std::min(T, std::max<int64_t>(0, y)); }
      for (int64_t j = 0; j < kt; j++) { int32_t lo = INT32_MAX, hi = INT32_MIN, ls = INT32_MIN, se = INT32_MAX; for (int64_t s = j * 128; s < std::min<int64_t>(S, j * 128 + 128); s++) { int32_t x = a[r * S + s], y = e[r * S + s]; if (x < y) lo = std::min(lo, x), hi = std::max(hi, y); ls = std::max(ls, x); se = std::min(se, y); } bo[(r * 4 + 0) * kt + j] = lo, bo[(r * 4 + 1) * kt + j] = hi, bo[(r * 4 + 2) * kt + j] = ls, bo[(r * 4 + 3) * kt + j] = se; } }
    for (auto [w, x] : {std::pair<View*, Buffer*>{&p.start, &start}, {&p.end, &end}}) { w->data = x->device; w->kv = S; w->col = 1; w->batch[0] = B > 1 ? K * S : 0; x->up(); }
    p.bounds.data = bounds.device; p.bounds.kv = 4 * kt; p.bounds.row = kt; p.bounds.col = 1; p.bounds.batch[0] = B > 1 ? K * 4 * kt : 0; bounds.up();
  }
  auto visible = [&](int b, int n, int64_t t, int64_t s) { if (c.causal && s > t + (S - T)) return false; if (has_bits && !mask_at(b, n, t, s)) return false;
    if (has_intervals) { const size_t r = (size_t(b) * K + n / G) * S + s; const int32_t *a = (int32_t*)start.host.data(), *e = (int32_t*)end.host.data(); if (t < a[r] || t >= e[r]) return false; } return true; };
  // bias
  const int bh = c.bias_heads; const bool per_batch = c.bias == 1 || c.bias == 2 || c.bias == 5; const int64_t br = c.bias == 1 || c.bias == 3 || c.bias == 5 ? T : 1, bc = c.bias == 5 || c.bias == 6 ? 1 : S, bb = per_batch ? B : 1;
  const size_t nb = c.bias ? size_t(bb) * bh * br * bc : 0; auto bias_at = [&](int b, int n, int64_t t, int64_t s) { const int h = bh == N ? n : bh == K ? n / G : 0; return ((size_t(bb > 1 ? b : 0) * bh + h) * br + (br > 1 ? t : 0)) * bc + (bc > 1 ? s : 0); };
  if (c.bias) {
    bias.make(nb * size_of(c.bias_dtype)); for (size_t i = 0; i < nb; i++) if (timing && i >= 1000003) { memcpy(bias.host.data() + i * size_of(c.bias_dtype), bias.host.data(), std::min<size_t>(1000003, nb - i) * size_of(c.bias_dtype)); i += 1000002; } else put(bias.host.data(), i, timing ? (float)uniform() : (float)normal(), c.bias_dtype);
    if (c.hostile && bh == N && c.bias == 1) for (int b = 0; b < B; b++) for (int n = 0; n < N; n++) for (int64_t t = 0; t < T; t++) for (int64_t s = 0; s < S; s++) if (!visible(b, n, t, s)) put(bias.host.data(), bias_at(b, n, t, s), NAN, c.bias_dtype);
    auto bv = [&](View& w, Buffer& x) { w.data = x.device; heads(w, bh, br * bc); w.row = br > 1 ? bc : 0; w.col = bc > 1 ? 1 : 0; w.batch[0] = bb > 1 ? bh * br * bc : 0; };
    bv(p.bias, bias); bias.up();
    if (c.want_dbias) { dbias.make(nb * size_of(c.bias_dtype), !timing || nb < 1e8); bv(p.dbias, dbias); CK(cudaMemset(dbias.device, 0xff, dbias.bytes)); }
  }
  const size_t rows = size_t(B) * K * qt * 128; const int HD = H <= 64 ? 64 : 128; stats.make(rows * 8, false), dqs.make(rows * HD * 4, false), turn.make(rows / 32 * 4, false); CK(cudaMemset(dqs.device, 0xff, dqs.bytes));
  sm80::BackwardBuffers buffers{(float*)stats.device, (float*)dqs.device, (int*)turn.device, nullptr, 0};
  const bool summed = c.bias && c.want_dbias && ((bb == 1 && B > 1) || (bh != N && bh != K) || bc == 1 || (br == 1 && bh == N && G > 1) || (bh == 1 && K > 1));
  if (summed) { sums.make(nb * 4, false); buffers.dbias = (float*)sums.device; buffers.dbias_elements = nb; }
  // oracle
  std::vector<double> rq, rk, rv, rb; double rb_norm = 0; float* L = (float*)lse.host.data(); float* DL = (float*)dlse.host.data();
  if (!timing) {
    rq.assign(nq, 0), rk.assign(nk, 0), rv.assign(nk, 0), rb.assign(nb, 0); const char *Q = q.host.data(), *KK = k.host.data(), *V = v.host.data(); char* D = dout.host.data();
    for (int b = 0; b < B; b++) for (int n = 0; n < N; n++) for (int64_t t = 0; t < T; t++) {
      const size_t row = (size_t(b) * T + t) * N + n; std::vector<double> x(S), f(S, 1.0); double m = -INFINITY; DL[row] = (float)normal() * 0.1f;
      for (int64_t s = 0; s < S; s++) { const size_t kr = (size_t(b) * S + s) * K + n / G; double a = 0; for (int h = 0; h < H; h++) a += (double)get(Q, row * H + h, dt) * get(KK, kr * H + h, dt); a *= p.scale; if (c.softcap) { const double z = tanh(a / c.softcap); a = c.softcap * z; f[s] = 1 - z * z; }
        if (!visible(b, n, t, s)) a = -INFINITY; else if (c.bias) a += get(bias.host.data(), bias_at(b, n, t, s), c.bias_dtype); x[s] = a; m = std::max(m, a); }
      if (m == -INFINITY) { L[row] = -INFINITY; if (c.hostile) { DL[row] = NAN; for (int h = 0; h < H; h++) put(D, row * H + h, NAN, dt); } continue; }
      double z = 0; for (auto& a : x) a = exp(a - m), z += a; L[row] = m + log(z); std::vector<double> o(H, 0.0); for (auto& a : x) a /= z;
      std::vector<double> dp(S); double de = 0; for (int64_t s = 0; s < S; s++) { const size_t kr = (size_t(b) * S + s) * K + n / G; double a = 0; for (int h = 0; h < H; h++) { a += (double)get(D, row * H + h, dt) * get(V, kr * H + h, dt); o[h] += x[s] * get(V, kr * H + h, dt); } dp[s] = a; }
      for (int h = 0; h < H; h++) put(out.host.data(), row * H + h, o[h], dt), de += o[h] * get(D, row * H + h, dt); de -= DL[row];
      for (int64_t s = 0; s < S; s++) if (x[s] != 0) { const size_t kr = (size_t(b) * S + s) * K + n / G; const double g = x[s] * (dp[s] - de), ds = g * f[s] * p.scale; if (c.bias) rb[bias_at(b, n, t, s)] += g, rb_norm += g * g; for (int h = 0; h < H; h++) rq[row * H + h] += ds * get(KK, kr * H + h, dt), rk[kr * H + h] += ds * get(Q, row * H + h, dt), rv[kr * H + h] += x[s] * get(D, row * H + h, dt); }
    }
  } else { for (size_t i = 0; i < size_t(B) * T * N; i++) L[i] = 9.0f, DL[i] = 0; for (size_t i = 0; i < nq; i++) put(out.host.data(), i, 0.01f, dt); }
  for (Buffer* x : {&q, &k, &v, &out, &dout, &lse, &dlse}) x->up(); for (Buffer* x : {&dq, &dk, &dv}) CK(cudaMemset(x->device, 0xff, x->bytes));
  const cudaError_t e = backward(p, buffers); if (e != cudaSuccess) { printf("%-44s launch: %s\n", c.name, cudaGetErrorString(e)); cudaGetLastError(); return -1; }
  const cudaError_t sync = cudaDeviceSynchronize(); if (sync != cudaSuccess) { printf("%-44s run: %s\n", c.name, cudaGetErrorString(sync)); exit(1); }
  if (!timing) {
    auto error = [&](Buffer& x, const std::vector<double>& r, DType d, double norm) { x.down(); double a = 0, b = 0; for (size_t i = 0; i < r.size(); i++) { const double t = get(x.host.data(), i, d) - r[i]; a += t * t, b += r[i] * r[i]; } return sqrt(a / std::max({b, norm, 1e-30})); };
    const double a = error(dq, rq, dt, 0), b = error(dk, rk, dt, 0), d = error(dv, rv, dt, 0), g = c.bias && c.want_dbias ? error(dbias, rb, c.bias_dtype, rb_norm) : 0; const double limit = c.bf16 ? 1e-2 : 2e-3;
    const bool ok = a < limit && b < limit && d < limit && g < limit; std::string note;
    if (c.deterministic) { std::vector<char> first = dq.host, second = c.bias && c.want_dbias ? dbias.host : std::vector<char>(); bool same = true; for (int i = 0; i < 5; i++) { CK(backward(p, buffers)); dq.down(); same &= first == dq.host; if (second.size()) { dbias.down(); same &= second == dbias.host; } } note = same ? " bitwise" : " NOT BITWISE"; }
    printf("%-44s dq %.1e dk %.1e dv %.1e dbias %.1e %s%s\n", c.name, a, b, d, g, ok ? "ok" : "FAIL", note.c_str()); fflush(stdout); return ok ? 0 : -1;
  }
  cudaEvent_t e0, e1; CK(cudaEventCreate(&e0)); CK(cudaEventCreate(&e1)); std::vector<float> ms; for (int i = 0; i < 12; i++) { CK(cudaEventRecord(e0)); CK(backward(p, buffers)); CK(cudaEventRecord(e1)); CK(cudaEventSynchronize(e1)); float m; CK(cudaEventElapsedTime(&m, e0, e1)); if (i > 2) ms.push_back(m); }
  std::sort(ms.begin(), ms.end()); const double fl = 10.0 * B * N * double(T) * S * H * (c.causal ? 0.5 : 1.0); printf("%-44s %8.3f ms  %6.0f TFLOP/s (dense count)\n", c.name, ms[4], fl / ms[4] / 1e9); fflush(stdout); return ms[4];
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all"; int failed = 0; const DType b16 = DType::kBF16, f16 = DType::kF16, f32 = DType::kF32; (void)f16;
  if (what != "time") {
    std::vector<Case> cases = {
        {"plain", true, 1, 128, 128, 4, 1, 128, false}, {"causal", true, 1, 200, 300, 4, 2, 128, true}, {"causal T > S", true, 2, 300, 200, 4, 2, 128, true}, {"G=1 f16", false, 2, 130, 260, 2, 2, 128, true}, {"G=3", true, 1, 150, 200, 6, 2, 128, true}, {"H=64", true, 2, 200, 300, 4, 1, 64, true}, {"H=64 f16 G=8", false, 1, 200, 150, 8, 1, 64, false}, {"H=96", true, 1, 200, 300, 4, 2, 96, true}, {"H=40", true, 1, 100, 300, 4, 2, 40, true}, {"G=48", true, 1, 20, 200, 48, 1, 128, true}, {"softcap", true, 1, 200, 300, 4, 2, 128, true, 0, 0, 0, 0, b16, 3.0f},
        {"bits K heads", true, 2, 200, 300, 4, 2, 128, true, 1, 2}, {"bits N heads", true, 1, 200, 300, 4, 2, 128, false, 1, 4}, {"bits 1 head hostile", true, 1, 200, 300, 4, 2, 128, true, 1, 1, 0, 0, b16, 0, true, false, 0.5, 0, true}, {"intervals", true, 2, 200, 300, 4, 2, 128, false, 2}, {"intervals window causal", true, 1, 400, 400, 8, 2, 64, true, 2, 0, 0, 0, b16, 0, true, false, 0.5, 100}, {"bits and intervals", true, 1, 200, 300, 4, 2, 128, true, 3, 2},
        {"bias K heads", true, 2, 200, 304, 4, 2, 128, true, 0, 0, 1, 2}, {"bias K heads unaligned", true, 1, 200, 301, 4, 2, 128, true, 0, 0, 1, 2}, {"bias N heads", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 1, 4}, {"bias N heads f32", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 1, 4, f32}, {"bias K heads f32 G=3", true, 1, 100, 304, 6, 2, 128, true, 0, 0, 1, 2, f32}, {"bias 1 head f16", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 1, 1, f16}, {"bias batch broadcast", true, 3, 200, 304, 4, 4, 64, false, 0, 0, 3, 4}, {"mask + bias K heads", true, 1, 256, 384, 8, 2, 128, true, 1, 2, 1, 2}, {"mask + bias N heads hostile", true, 1, 256, 384, 8, 2, 128, true, 1, 8, 1, 8, b16, 0, true, false, 0.5, 0, true}, {"mask + bias H=64 f16", false, 1, 256, 384, 8, 2, 64, true, 1, 2, 1, 2, f16}, {"mask + bias softcap", true, 1, 256, 384, 8, 2, 128, true, 1, 2, 1, 2, b16, 4.0f}, {"mask + bias G=3", true, 1, 200, 384, 6, 2, 128, true, 1, 2, 1, 2},
        {"mask + bias G=3 hostile", true, 1, 200, 384, 6, 2, 128, true, 1, 6, 1, 6, b16, 0, true, false, 0.5, 0, true}, {"bias no dbias", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 1, 2, b16, 0, false}, {"key bias", true, 2, 200, 304, 4, 2, 128, true, 0, 0, 2, 2}, {"key bias intervals f32", true, 1, 200, 304, 4, 2, 128, false, 2, 0, 2, 2, f32}, {"key bias batch broadcast", true, 3, 200, 304, 4, 2, 64, true, 0, 0, 4, 2}, {"key bias bits", true, 1, 200, 304, 4, 2, 128, true, 1, 2, 2, 2}, {"key bias softcap", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 2, 2, b16, 3.0f}, {"bias [.., N, 1, S]", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 2, 4}, {"bias [.., K, T, 1]", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 5, 2}, {"bias [1, 1, 1, 1]", true, 2, 200, 304, 4, 2, 128, true, 0, 0, 6, 1},
        {"deterministic causal", true, 1, 1000, 1100, 8, 2, 128, true, 0, 0, 0, 0, b16, 0, true, true}, {"deterministic", true, 1, 600, 1100, 8, 2, 64, false, 0, 0, 0, 0, b16, 0, true, true}, {"deterministic mask + bias", true, 2, 300, 700, 4, 2, 128, true, 1, 2, 3, 2, b16, 0, true, true}, {"deterministic [.., K, T, 1]", true, 1, 200, 304, 4, 2, 128, true, 0, 0, 5, 2, b16, 0, true, true}};
    for (auto& c : cases) failed += run(c, false) < 0;
    printf("%d failed of %zu\n", failed, cases.size());
  }
  if (what != "check") {
    const int L = 8192; std::vector<Case> cases = {
        {"A none", true, 1, L, L, 32, 8, 128, true}, {"A none deterministic", true, 1, L, L, 32, 8, 128, true, 0, 0, 0, 0, b16, 0, true, true}, {"A bias [1,8,1,T]", true, 1, L, L, 32, 8, 128, true, 0, 0, 2, 8}, {"A intervals window 1024", true, 1, L, L, 32, 8, 128, true, 2, 0, 0, 0, b16, 0, true, false, 0.5, 1024}, {"A bias [1,8,T,T]", true, 1, L, L, 32, 8, 128, true, 0, 0, 1, 8}, {"A mask + bias [1,8,T,T]", true, 1, L, L, 32, 8, 128, true, 1, 8, 1, 8, b16, 0, true, false, 0.25}, {"A mask + bias [1,8,T,T], no dbias", true, 1, L, L, 32, 8, 128, true, 1, 8, 1, 8, b16, 0, false, false, 0.25}, {"A mask [1,8] + bias [1,32,T,T]", true, 1, L, L, 32, 8, 128, true, 1, 8, 1, 32, b16, 0, true, false, 0.25},
        {"B none (H=64)", true, 1, L, L, 32, 8, 64, true}, {"B mask + bias [1,8,T,T]", true, 1, L, L, 32, 8, 64, true, 1, 8, 1, 8, b16, 0, true, false, 0.25}, {"E B=T=384 N=K=4 H=32, bias over the batch", true, 384, 384, 384, 4, 4, 32, false, 0, 0, 3, 4}};
    for (auto& c : cases) run(c, true);
  }
  return failed != 0;
}
