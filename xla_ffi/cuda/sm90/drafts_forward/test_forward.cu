// Stand-alone test and benchmark of the sm_90a forward kernels: no JAX.
//   test_forward [check|time|all] [name filter]
// Checks small random calls of every mask and bias kind against a float64 evaluation on the host, then times workload A and
// its relatives. Exit status 1 where a check fails.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "launch.h"

using namespace jax_dma;

#define CHECK(call)                                                                                        \
  do {                                                                                                     \
    const cudaError_t e = (call);                                                                          \
    if (e != cudaSuccess) printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e)), std::exit(2); \
  } while (0)

struct Case {
  std::string name;
  int B = 1, T = 1, S = 1, N = 1, K = 1, H = 64, Hv = 0;
  bool causal = false;
  DType dtype = DType::kBF16;
  char mask = '0';                       // '0' none, 'b' bits, 'i' intervals, 'x' both
  int mask_heads = 1, mask_batch = 1;    // 1, K or N; 1 or B
  bool mask_rows = true, mask_cols = true;
  double density = 0.5;                  // of visible positions
  char bias = '0';                       // '0' none, 'k' [.., 1, S], 't' [.., T, S], 'r' [.., T, 1]
  int bias_heads = 1, bias_batch = 1;
  DType bias_dtype = DType::kBF16;
  double bias_scale = 1, bias_shift = 0;
  bool poison = false;                   // NaN, inf and finfo.min in the bias
  float softcap = 0, scale = 0;          // 0: H ** -0.5
  int window = 0;                        // timing: sliding window
};

static size_t bytes_of(DType t) { return t == DType::kF32 ? 4 : 2; }
static float rounded(DType t, float x, void* at) {
  if (t == DType::kF32) return *static_cast<float*>(at) = x;
  if (t == DType::kBF16) return __bfloat162float(*static_cast<__nv_bfloat16*>(at) = __float2bfloat16(x));
  return __half2float(*static_cast<__half*>(at) = __float2half(x));
}
static float value(DType t, const void* at) {
  if (t == DType::kF32) return *static_cast<const float*>(at);
  if (t == DType::kBF16) return __bfloat162float(*static_cast<const __nv_bfloat16*>(at));
  return __half2float(*static_cast<const __half*>(at));
}

static std::vector<void*> allocated;
static void* device(size_t bytes) {
  void* pointer = nullptr;
  CHECK(cudaMalloc(&pointer, std::max<size_t>(bytes, 256)));
  allocated.push_back(pointer);
  return pointer;
}
template <class V>
static void* upload(const std::vector<V>& host) {
  void* pointer = device(host.size() * sizeof(V));
  CHECK(cudaMemcpy(pointer, host.data(), host.size() * sizeof(V), cudaMemcpyHostToDevice));
  return pointer;
}
static void release_all() {
  for (void* pointer : allocated) cudaFree(pointer);
  allocated.clear();
}

static View heads_view(void* data, int heads, int64_t stride, int N, int K, int64_t batch_stride) {
  View view;
  view.data = data, view.batch[0] = batch_stride;
  if (heads == N && N != K) view.kv = N / K * stride, view.group = stride;
  else if (heads != 1) view.kv = stride;
  return view;
}
static View rows_view(void* data, int64_t length, int heads, int channels, bool grouped, int G) {
  View view;
  view.data = data, view.col = 1, view.row = int64_t{heads} * channels, view.batch[0] = length * heads * channels;
  view.kv = (grouped ? G : 1) * channels, view.group = grouped ? channels : 0;
  return view;
}

static Problem base_problem(const Case& c, void* q, void* k, void* v, void* out, void* lse) {
  Problem p;
  const int Hv = c.Hv ? c.Hv : c.H;
  p.batch_rank = c.B > 1 ? 1 : 0, p.batch_size[0] = c.B, p.B = c.B, p.T = c.T, p.S = c.S;
  p.N = c.N, p.K = c.K, p.G = c.N / c.K, p.H = c.H, p.Hv = Hv;
  p.query_tiles = ceil_div(c.T, queries_per_tile(p.G)), p.key_tiles = ceil_div(c.S, kKeyTile);
  p.scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<float>(c.H)), p.softcap = c.softcap, p.causal = c.causal, p.dtype = c.dtype, p.bias_dtype = c.bias_dtype;
  p.q = rows_view(q, c.T, c.N, c.H, true, p.G), p.k = rows_view(k, c.S, c.K, c.H, false, p.G), p.v = rows_view(v, c.S, c.K, Hv, false, p.G);
  p.out = rows_view(out, c.T, c.N, Hv, true, p.G), p.lse = rows_view(lse, c.T, c.N, 1, true, p.G);
  return p;
}

static bool check(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  const int G = c.N / c.K, Hv = c.Hv ? c.Hv : c.H, tile_queries = queries_per_tile(G);
  const auto tensor = [&](size_t count, DType type, double scale, double shift, std::vector<char>* raw) {
    std::vector<float> values(count);
    raw->resize(count * bytes_of(type));
    for (size_t i = 0; i < count; ++i) values[i] = rounded(type, static_cast<float>(normal(random) * scale + shift), raw->data() + i * bytes_of(type));
    return values;
  };
  std::vector<char> rq, rk, rv, rb;
  const auto q = tensor(size_t(c.B) * c.T * c.N * c.H, c.dtype, 1, 0, &rq), k = tensor(size_t(c.B) * c.S * c.K * c.H, c.dtype, 1, 0, &rk),
             v = tensor(size_t(c.B) * c.S * c.K * Hv, c.dtype, 1, 0, &rv);
  const size_t rows = size_t(c.B) * c.T * c.N;
  void *out = device(rows * Hv * 2), *lse = device(rows * 4);
  CHECK(cudaMemset(out, 0xff, rows * Hv * 2));
  CHECK(cudaMemset(lse, 0xff, rows * 4));
  Problem p = base_problem(c, upload(rq), upload(rk), upload(rv), out, lse);

  // Masks. visible_bits / intervals at (batch, head of the mask, t, s).
  const bool bits = c.mask == 'b' || c.mask == 'x', intervals = c.mask == 'i' || c.mask == 'x';
  const auto mask_head = [&](int n) { return c.mask_heads == 1 ? 0 : c.mask_heads == c.N ? n : n / G; };
  const int MT = c.mask_rows ? c.T : 1, MS = c.mask_cols ? c.S : 1;
  std::vector<char> dense;
  std::vector<int> start, end;
  if (bits) {
    dense.resize(size_t(c.mask_batch) * c.mask_heads * MT * MS);
    // Whole regions of 96 x 160 are empty or full now and then, so that all tile classes occur; the first query of all sees nothing.
    const int rt = MT / 96 + 1, rs = MS / 160 + 1;
    std::vector<double> region(size_t(c.mask_batch) * c.mask_heads * rt * rs);
    for (auto& d : region) {
      const double u = uniform(random);
      d = u < 0.25 ? 0 : u < 0.5 ? 1 : c.density;
    }
    size_t at = 0;
    for (int h = 0; h < c.mask_batch * c.mask_heads; ++h)
      for (int t = 0; t < MT; ++t)
        for (int s = 0; s < MS; ++s) dense[at++] = (t != 0 || MT == 1) && uniform(random) < region[(size_t(h) * rt + t / 96) * rs + s / 160];
    const int words = c.mask_cols ? 4 * static_cast<int>(p.key_tiles) : 1;
    std::vector<uint32_t> packed(size_t(c.mask_batch) * c.mask_heads * MT * words);
    for (size_t r = 0; r < packed.size() / words; ++r)
      for (int s = 0; s < MS; ++s)
        if (dense[r * MS + s]) packed[r * words + s / 32] |= c.mask_cols ? 1u << (s % 32) : ~0u;
    p.bits = heads_view(upload(packed), c.mask_heads, int64_t{MT} * words, c.N, c.K, c.mask_batch > 1 ? int64_t{c.mask_heads} * MT * words : 0);
    p.bits.row = c.mask_rows ? words : 0, p.bits.col = c.mask_cols ? 1 : 0;
    // The map of tiles, per kv head (all of it, for simplicity).
    const int tw = static_cast<int>(ceil_div(p.key_tiles, kTilesPerWord));
    std::vector<uint32_t> map(size_t(c.mask_batch) * c.K * p.query_tiles * 2 * tw);
    for (int b = 0; b < c.mask_batch; ++b)
      for (int h = 0; h < c.K; ++h)
        for (int qt = 0; qt < p.query_tiles; ++qt)
          for (int kt = 0; kt < p.key_tiles; ++kt) {
            bool any = false, all = true;
            for (int g = 0; g < G; ++g)
              for (int t = qt * tile_queries; t < std::min((qt + 1) * tile_queries, c.T); ++t)
                for (int s = kt * 128; s < std::min((kt + 1) * 128, c.S); ++s) {
                  const bool see = dense[((size_t(b) * c.mask_heads + mask_head(h * G + g)) * MT + (c.mask_rows ? t : 0)) * MS + (c.mask_cols ? s : 0)];
                  any |= see, all &= see;
                }
            uint32_t* word = &map[((size_t(b) * c.K + h) * p.query_tiles + qt) * 2 * tw + kt / 32];
            if (any) word[0] |= 1u << (kt % 32);
            if (all) word[tw] |= 1u << (kt % 32);
          }
    p.tiles_by_query.data = upload(map), p.tiles_by_query.col = 1, p.tiles_by_query.row = 2 * tw, p.tiles_by_query_plane = tw;
    p.tiles_by_query.kv = p.query_tiles * 2 * tw, p.tiles_by_query.batch[0] = c.mask_batch > 1 ? c.K * p.query_tiles * 2 * tw : 0;
  }
  if (intervals) {
    start.resize(size_t(c.mask_batch) * c.mask_heads * c.S), end.resize(start.size());
    for (size_t i = 0; i < start.size(); ++i) {
      const int s = static_cast<int>(i % c.S);
      start[i] = (s / 128) % 3 == 0 ? 0 : static_cast<int>(random() % (c.T + 1));
      end[i] = (s / 128) % 3 == 0 ? c.T : (s / 128) % 3 == 1 ? std::min(c.T, start[i] + static_cast<int>(random() % 100)) : static_cast<int>(random() % (c.T + 1));
    }
    std::vector<int> bounds(size_t(c.mask_batch) * c.K * 4 * p.key_tiles);
    for (int b = 0; b < c.mask_batch; ++b)
      for (int h = 0; h < c.K; ++h)
        for (int kt = 0; kt < p.key_tiles; ++kt) {
          int first = INT32_MAX, last = INT32_MIN, latest = INT32_MIN, earliest = INT32_MAX;
          for (int g = 0; g < G; ++g)
            for (int s = kt * 128; s < std::min((kt + 1) * 128, c.S); ++s) {
              const size_t i = (size_t(b) * c.mask_heads + mask_head(h * G + g)) * c.S + s;
              if (start[i] < end[i]) first = std::min(first, start[i]), last = std::max(last, end[i]);
              latest = std::max(latest, start[i]), earliest = std::min(earliest, end[i]);
            }
          int* to = &bounds[(size_t(b) * c.K + h) * 4 * p.key_tiles + kt];
          to[0] = first, to[p.key_tiles] = last, to[2 * p.key_tiles] = latest, to[3 * p.key_tiles] = earliest;
        }
    p.start = heads_view(upload(start), c.mask_heads, c.S, c.N, c.K, c.mask_batch > 1 ? int64_t{c.mask_heads} * c.S : 0);
    p.end = p.start, p.end.data = upload(end), p.start.col = p.end.col = 1;
    p.bounds.data = upload(bounds), p.bounds.col = 1, p.bounds.row = p.key_tiles, p.bounds.kv = 4 * p.key_tiles;
    p.bounds.batch[0] = c.mask_batch > 1 ? c.K * 4 * p.key_tiles : 0;
  }
  const int BT = c.bias == 'k' ? 1 : c.T, BS = c.bias == 'r' ? 1 : c.S;
  std::vector<float> bias;
  const auto bias_head = [&](int n) { return c.bias_heads == 1 ? 0 : c.bias_heads == c.N ? n : n / G; };
  if (c.bias != '0') {
    bias = tensor(size_t(c.bias_batch) * c.bias_heads * BT * BS, c.bias_dtype, c.bias_scale, c.bias_shift, &rb);
    if (c.poison)
      for (size_t i = 0; i < bias.size(); ++i) {
        const float minimum = c.bias_dtype == DType::kF32 ? -std::numeric_limits<float>::max() : -3.3895313892515355e38f;
        if (i % 7 == 3) bias[i] = rounded(c.bias_dtype, i % 2 ? minimum : -INFINITY, rb.data() + i * bytes_of(c.bias_dtype));
      }
    // Anything may stand in the bias where the mask hides (for a mask and a bias of one shape).
    if (c.poison && bits && c.mask_heads == c.bias_heads && c.mask_batch == c.bias_batch && c.bias == 't' && c.mask_rows && c.mask_cols)
      for (size_t i = 0; i < bias.size(); ++i)
        if (!dense[i] && i % 5 == 0) rounded(c.bias_dtype, i % 2 ? NAN : INFINITY, rb.data() + i * bytes_of(c.bias_dtype));
    p.bias = heads_view(upload(rb), c.bias_heads, int64_t{BT} * BS, c.N, c.K, c.bias_batch > 1 ? int64_t{c.bias_heads} * BT * BS : 0);
    p.bias.row = BT == 1 && c.bias == 'k' ? 0 : BS, p.bias.col = c.bias == 'r' ? 0 : 1;
  }

  const cudaError_t error = sm90::forward(p, 0);
  if (error == cudaErrorNotSupported) {
    printf("%-58s not supported: sm80\n", c.name.c_str());
    release_all();
    return true;
  }
  CHECK(error);
  CHECK(cudaDeviceSynchronize());
  std::vector<char> ro(rows * Hv * 2);
  std::vector<float> rl(rows);
  CHECK(cudaMemcpy(ro.data(), out, ro.size(), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(rl.data(), lse, rows * 4, cudaMemcpyDeviceToHost));

  double error2 = 0, norm2 = 0, lse_error2 = 0, lse_norm2 = 0;
  int wrong = 0, empty = 0;
  std::mutex mutex;
  const auto judge = [&](int thread, int threads) {
    double error2_ = 0, norm2_ = 0, lse_error2_ = 0, lse_norm2_ = 0;
    int wrong_ = 0, empty_ = 0;
    std::vector<double> x(c.S), o(Hv);
    for (int bt = thread; bt < c.B * c.T; bt += threads)
      for (int n = 0; n < c.N; ++n) {
        const int b = bt / c.T, t = bt % c.T;
        double peak = -INFINITY;
        for (int s = 0; s < c.S; ++s) {
          bool see = !c.causal || s <= t + c.S - c.T;
          const int mb = c.mask_batch > 1 ? b : 0;
          if (see && bits) see = dense[((size_t(mb) * c.mask_heads + mask_head(n)) * MT + (c.mask_rows ? t : 0)) * MS + (c.mask_cols ? s : 0)];
          if (see && intervals) {
            const size_t i = (size_t(mb) * c.mask_heads + mask_head(n)) * c.S + s;
            see = start[i] <= t && t < end[i];
          }
          double add = 0;
          if (see && c.bias != '0') {
            add = bias[((size_t(c.bias_batch > 1 ? b : 0) * c.bias_heads + bias_head(n)) * BT + (c.bias == 'k' ? 0 : t)) * BS + (c.bias == 'r' ? 0 : s)];
            if (add <= -1e30) see = false;
          }
          if (!see) {
            x[s] = -INFINITY;
            continue;
          }
          double dot = 0;
          const float *qr = &q[((size_t(b) * c.T + t) * c.N + n) * c.H], *kr = &k[((size_t(b) * c.S + s) * c.K + n / G) * c.H];
          for (int h = 0; h < c.H; ++h) dot += double(qr[h]) * kr[h];
          dot *= p.scale;
          if (c.softcap != 0) dot = c.softcap * std::tanh(dot / c.softcap);
          x[s] = std::fabs(c.bias_shift) > 1e5 ? static_cast<float>(dot + add) : dot + add;  // f32 has no more digits
          peak = std::max(peak, x[s]);
        }
        double sum = 0;
        std::fill(o.begin(), o.end(), 0.0);
        if (peak > -INFINITY)
          for (int s = 0; s < c.S; ++s) {
            if (x[s] == -INFINITY) continue;
            const double y = std::exp(x[s] - peak);
            sum += y;
            const float* vr = &v[((size_t(b) * c.S + s) * c.K + n / G) * Hv];
            for (int h = 0; h < Hv; ++h) o[h] += y * vr[h];
          }
        const size_t row = (size_t(b) * c.T + t) * c.N + n;
        for (int h = 0; h < Hv; ++h) {
          const double want = sum > 0 ? o[h] / sum : 0, got = value(c.dtype, ro.data() + 2 * (row * Hv + h));
          if (!(std::fabs(got) < 1e30) || (sum == 0 && got != 0)) ++wrong_;
          else error2_ += (got - want) * (got - want), norm2_ += want * want;
        }
        if (sum == 0) {
          ++empty_;
          if (rl[row] != -INFINITY) ++wrong_;
        } else {
          const double want = peak + std::log(sum), difference = rl[row] - want;
          if (!std::isfinite(difference)) ++wrong_;
          else lse_error2_ += difference * difference, lse_norm2_ += want * want;
        }
      }
    const std::lock_guard<std::mutex> lock(mutex);
    error2 += error2_, norm2 += norm2_, lse_error2 += lse_error2_, lse_norm2 += lse_norm2_, wrong += wrong_, empty += empty_;
  };
  std::vector<std::thread> threads;
  const int count = std::max(1u, std::thread::hardware_concurrency());
  for (int i = 0; i < count; ++i) threads.emplace_back(judge, i, count);
  for (auto& thread : threads) thread.join();
  const double e = std::sqrt(error2 / std::max(norm2, 1e-30)), le = std::sqrt(lse_error2 / std::max(lse_norm2, 1e-30));
  const bool good = wrong == 0 && e <= (c.dtype == DType::kBF16 ? 5e-3 : 1e-3) && le <= 1e-3;
  printf("%-58s out %.1e lse %.1e wrong %d empty rows %d %s\n", c.name.c_str(), e, le, wrong, empty, good ? "" : "  <-- FAILED");
  fflush(stdout);
  release_all();
  return good;
}

static std::vector<Case> small_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, auto set) {
    Case c;
    c.B = 2, c.T = 300, c.S = 333, c.N = 4, c.K = 2, c.H = 128, c.name = name;
    set(c);
    cases.push_back(c);
  };
  // The simplest first: one tile, then one row of tiles, then everything.
  add("one tile, H64", [](Case& c) { c.B = 1, c.T = c.S = 128, c.N = c.K = 1, c.H = 64; });
  add("one tile, H128", [](Case& c) { c.B = 1, c.T = c.S = 128, c.N = c.K = 1; });
  add("one tile, H256", [](Case& c) { c.B = 1, c.T = c.S = 128, c.N = c.K = 1, c.H = 256; });
  add("many key tiles", [](Case& c) { c.B = 1, c.T = 128, c.S = 1024, c.N = c.K = 1; });
  add("many items per block", [](Case& c) { c.B = 8, c.T = 1000, c.S = 200, c.N = 8, c.K = 8, c.H = 64; });
  for (int H : {32, 64, 96, 128, 192, 256})
    for (bool causal : {false, true}) {
      add(("none, H" + std::to_string(H) + (causal ? " causal" : "")).c_str(), [&](Case& c) { c.H = H, c.causal = causal; });
      add(("none, f16, T > S, H" + std::to_string(H) + (causal ? " causal" : "")).c_str(), [&](Case& c) { c.H = H, c.causal = causal, c.dtype = DType::kF16, c.S = 150; });
    }
  for (int G : {1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 64}) add(("G=" + std::to_string(G) + " causal").c_str(), [&](Case& c) { c.N = 2 * G, c.causal = true, c.T = 150, c.S = 260; });
  add("Hv != H", [](Case& c) { c.H = 64, c.Hv = 128; });
  add("Hv < H", [](Case& c) { c.H = 128, c.Hv = 40; });
  add("softcap", [](Case& c) { c.softcap = 2; });
  add("negative scale", [](Case& c) { c.scale = -0.1f; });
  add("T=1", [](Case& c) { c.T = 1, c.S = 700, c.causal = true; });
  for (int H : {64, 128, 256})
    for (char mask : {'0', 'b', 'i', 'x'})
      for (int mask_heads : {1, 2, 8})
        for (char bias : {'0', 'k', 't', 'r'})
          for (int bias_heads : {1, 2, 8}) {
            if ((mask == '0' && mask_heads != 1) || (bias == '0' && bias_heads != 1) || (mask == '0' && bias == '0')) continue;
            if (bias == 'r' && bias_heads == 1) continue;
            const bool causal = (mask_heads + bias_heads + H / 64) % 2;
            const DType bias_dtype = (mask_heads + H / 64) % 3 == 0 ? DType::kF32 : (bias_heads + mask_heads) % 5 == 0 ? DType::kF16 : DType::kBF16;
            add(("H" + std::to_string(H) + " mask " + mask + std::to_string(mask_heads) + " bias " + bias + std::to_string(bias_heads) + (causal ? " causal" : "") +
                 (bias_dtype == DType::kF32 ? " f32" : bias_dtype == DType::kF16 ? " f16" : ""))
                    .c_str(),
                [&](Case& c) {
                  c.N = 8, c.T = 200, c.S = bias_heads == 2 ? 330 : 336, c.H = H, c.causal = causal, c.mask = mask, c.mask_heads = mask_heads, c.bias = bias, c.bias_heads = bias_heads;
                  c.bias_dtype = bias_dtype, c.mask_batch = mask_heads == 1 ? 1 : 2, c.bias_batch = bias_heads == 1 ? 1 : 2;
                });
          }
  for (int G : {1, 3, 4}) {
    add(("mask + bias N heads, poison, G=" + std::to_string(G)).c_str(), [&](Case& c) { c.N = 2 * G, c.S = 336, c.mask = 'b', c.mask_heads = c.bias_heads = 2 * G, c.bias = 't', c.poison = true, c.mask_batch = c.bias_batch = 2; });
    add(("mask + bias K heads, poison f32, G=" + std::to_string(G)).c_str(), [&](Case& c) { c.N = 2 * G, c.S = 336, c.mask = 'b', c.mask_heads = c.bias_heads = 2, c.bias = 't', c.poison = true, c.mask_batch = c.bias_batch = 2, c.bias_dtype = DType::kF32; });
  }
  add("key bias, poison", [](Case& c) { c.bias = 'k', c.poison = true, c.bias_dtype = DType::kF32; });
  add("very large bias", [](Case& c) { c.bias = 't', c.S = 336, c.bias_dtype = DType::kF32, c.bias_scale = 1, c.bias_shift = -3e6; });
  add("mask [T, 1]", [](Case& c) { c.mask = 'b', c.mask_cols = false; });
  add("mask [1, S]", [](Case& c) { c.mask = 'b', c.mask_rows = false, c.mask_heads = 2; });
  return cases;
}

// ---------------------------------------------------------------------------------------------------------------------
// Timing.

__device__ uint32_t mix(uint64_t i) {
  i ^= i >> 33, i *= 0xff51afd7ed558ccdull, i ^= i >> 33, i *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(i >> 32);
}
__global__ void fill_normal(__nv_bfloat16* x, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const float u = (mix(2 * i + (seed << 40)) + 1.0f) * 2.3283064e-10f, w = mix(2 * i + 1 + (seed << 40)) * 2.3283064e-10f;
    x[i] = __float2bfloat16(sqrtf(-2 * logf(fminf(u, 1.0f))) * cosf(6.2831853f * w));
  }
}
// Query t of T sees each key up to it with probability window / (t + 1): what a random top-k leaves.
__global__ void fill_bits(uint32_t* bits, int T, int words, size_t count, int window) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const int t = i / words % T, w = i % words;
    const float probability = fminf(1.0f, window / (t + 1.0f));
    uint32_t word = 0;
    for (int bit = 0; bit < 32; ++bit)
      if (32 * w + bit <= t && mix(i * 32 + bit + (uint64_t{7} << 50)) * 2.3283064e-10f < probability) word |= 1u << bit;
    bits[i] = word;
  }
}
static void* normal(size_t count, uint64_t seed) {
  void* x = device(count * 2);
  fill_normal<<<4096, 256>>>(static_cast<__nv_bfloat16*>(x), count, seed);
  return x;
}

static void time_case(const Case& c) {
  const size_t rows = size_t(c.B) * c.T * c.N;
  const int G = c.N / c.K;
  Problem p = base_problem(c, normal(rows * c.H, 1), normal(size_t(c.B) * c.S * c.K * c.H, 2), normal(size_t(c.B) * c.S * c.K * c.H, 3), device(rows * c.H * 2), device(rows * 4));
  double live = c.causal ? 0.5 : 1.0;
  if (c.mask == 'b') {
    const int words = 4 * static_cast<int>(p.key_tiles), tw = static_cast<int>(ceil_div(p.key_tiles, 32));
    const size_t count = size_t(c.mask_heads) * c.T * words;
    uint32_t* bits = static_cast<uint32_t*>(device(count * 4));
    fill_bits<<<4096, 256>>>(bits, c.T, words, count, 1024);
    p.bits = heads_view(bits, c.mask_heads, int64_t{c.T} * words, c.N, c.K, 0), p.bits.row = words, p.bits.col = 1;
    // A tile holds something unless it is past the diagonal; those of the first queries, which see everything, are full.
    std::vector<uint32_t> map(p.query_tiles * 2 * tw);
    const int queries = queries_per_tile(G);
    for (int qt = 0; qt < p.query_tiles; ++qt)
      for (int kt = 0; kt < p.key_tiles; ++kt) {
        if (kt * 128 <= (qt + 1) * queries - 1) map[qt * 2 * tw + kt / 32] |= 1u << (kt % 32);
        if ((qt + 1) * queries <= 1024 && kt * 128 + 127 <= qt * queries) map[(qt * 2 + 1) * tw + kt / 32] |= 1u << (kt % 32);
      }
    p.tiles_by_query.data = upload(map), p.tiles_by_query.col = 1, p.tiles_by_query.row = 2 * tw, p.tiles_by_query_plane = tw;
  }
  if (c.mask == 'i') {
    std::vector<int> start(c.S), end(c.S), bounds(4 * p.key_tiles);
    for (int s = 0; s < c.S; ++s) start[s] = s, end[s] = std::min(c.T, s + c.window + 1);
    for (int kt = 0; kt < p.key_tiles; ++kt) {
      const int a = kt * 128, z = std::min(c.S, a + 128) - 1;
      bounds[kt] = start[a], bounds[p.key_tiles + kt] = end[z], bounds[2 * p.key_tiles + kt] = start[z], bounds[3 * p.key_tiles + kt] = end[a];
    }
    p.start.data = upload(start), p.end.data = upload(end), p.start.col = p.end.col = 1;
    p.bounds.data = upload(bounds), p.bounds.col = 1, p.bounds.row = p.key_tiles;
    live = double(c.window) / c.S;
  }
  double bytes = 0;
  if (c.bias != '0') {
    const int BT = c.bias == 'k' ? 1 : c.T;
    p.bias = heads_view(normal(size_t(c.bias_heads) * BT * c.S, 4), c.bias_heads, int64_t{BT} * c.S, c.N, c.K, 0);
    p.bias.row = BT == 1 ? 0 : c.S, p.bias.col = 1;
    bytes += double(c.bias_heads) * BT * c.S * 2 * live;
  }
  cudaEvent_t a, z;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&z));
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    CHECK(cudaEventRecord(a));
    const cudaError_t error = sm90::forward(p, 0);
    if (error == cudaErrorNotSupported) {
      printf("| %-50s | not supported |\n", c.name.c_str());
      release_all();
      return;
    }
    CHECK(error);
    CHECK(cudaEventRecord(z));
    CHECK(cudaEventSynchronize(z));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, z));
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2], flop = 4.0 * c.B * c.N * double(c.T) * c.S * c.H * live;
  printf("| %-50s | %.4f ms | min %.4f | %.0f TFLOP/s | bias %.2f TB/s |\n", c.name.c_str(), ms, times[0], flop / ms / 1e9, bytes / ms / 1e9);
  fflush(stdout);
  release_all();
}

static std::vector<Case> large_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, auto set) {
    Case c;
    c.T = c.S = 8192, c.N = 32, c.K = 8, c.H = 128, c.causal = true, c.name = name;
    set(c);
    cases.push_back(c);
  };
  add("A none (target 0.86)", [](Case&) {});
  add("A none, not causal", [](Case& c) { c.causal = false; });
  add("A bias [1,8,1,T] (0.92)", [](Case& c) { c.bias = 'k', c.bias_heads = 8; });
  add("A bias [1,8,T,T]", [](Case& c) { c.bias = 't', c.bias_heads = 8; });
  add("A mask [1,8,T,T]", [](Case& c) { c.mask = 'b', c.mask_heads = 8; });
  add("A mask + bias [1,8,T,T] (1.2)", [](Case& c) { c.mask = 'b', c.mask_heads = 8, c.bias = 't', c.bias_heads = 8; });
  add("A mask + bias [1,32,T,T] (2.0)", [](Case& c) { c.mask = 'b', c.mask_heads = 32, c.bias = 't', c.bias_heads = 32; });
  add("A window 1024 (0.30)", [](Case& c) { c.mask = 'i', c.window = 1024; });
  add("H64 none (0.68)", [](Case& c) { c.H = 64; });
  add("H64 mask + bias [1,8,T,T] (0.95)", [](Case& c) { c.H = 64, c.mask = 'b', c.mask_heads = 8, c.bias = 't', c.bias_heads = 8; });
  add("H256 N16 K4 none (0.85)", [](Case& c) { c.H = 256, c.N = 16, c.K = 4; });
  add("H256 N16 K4 mask + bias [1,4,T,T]", [](Case& c) { c.H = 256, c.N = 16, c.K = 4, c.mask = 'b', c.mask_heads = 4, c.bias = 't', c.bias_heads = 4; });
  add("pair bias B=T=384 N4 H32 bias [1,4,T,T] (0.17)", [](Case& c) { c.B = c.T = c.S = 384, c.N = c.K = 4, c.H = 32, c.causal = false, c.bias = 't', c.bias_heads = 4; });
  add("pair bias B=T=768 N4 H64 bias [1,4,T,T] (1.2)", [](Case& c) { c.B = c.T = c.S = 768, c.N = c.K = 4, c.H = 64, c.causal = false, c.bias = 't', c.bias_heads = 4; });
  add("C N2 K1 T32768 H64 mask + bias (0.9)", [](Case& c) { c.T = c.S = 32768, c.N = 2, c.K = 1, c.H = 64, c.mask = 'b', c.bias = 't'; });
  return cases;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all", filter = argc > 2 ? argv[2] : "";
  int failed = 0, run = 0;
  if (what != "time")
    for (const Case& c : small_cases())
      if (c.name.find(filter) != std::string::npos) ++run, failed += !check(c, 1000 + run);
  if (what != "time") printf("%d checks, %d failed\n", run, failed);
  if (what != "check")
    for (const Case& c : large_cases())
      if (c.name.find(filter) != std::string::npos) time_case(c);
  return failed != 0;
}
