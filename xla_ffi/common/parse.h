// From the buffers of an XLA FFI call to a Problem, with every shape checked. Shared by the host and CUDA handlers.
//
// Operands, in order (absent ones are left out):
//   q [*batch, T, N, H]   k [*batch, S, K, H]   v [*batch, S, K, Hv]
//   has_bits:       bits [*batch, N|K|1, T|1, W|1] u32
//                   tiles_by_query [*batch, K|1, query_tiles|1, 2, words(key_tiles)|1] u32
//                   tiles_by_key [*batch, K|1, key_tiles|1, 2, words(query_tiles)|1] u32
//   has_intervals:  start, end [*batch, N|K|1, S] s32   bounds [*batch, K|1, 4, key_tiles + bounded_words] s32
//   has_bias:       bias [*batch, N|K|1, T|1, S|1]
//   backward:       out, lse [*batch, T, N, 2] f32, dout, dlse [*batch, T, N] f32
// Results: forward  out [*batch, T, N, Hv], lse;  backward  dq, dk, dv, [dbias].
// lse has two numbers for a row, whose sum it is (common/problem.h).
// Every batch axis of an operand is 1 or full. Results but dbias are full.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "problem.h"

namespace jax_dma {

namespace ffi = ::xla::ffi;

// The "config" attribute of the custom call. jax_dma/implementations/ffi.py writes it.
struct Config {
  int64_t has_bits, has_intervals, has_bias, causal, want_dbias, deterministic;
  float scale, softcap;
};

inline std::string shape_text(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

class Parser {
 public:
  Parser(const Config& config, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : config_(config), args_(args), rets_(rets) {}

  // `backward` selects the operand list; on failure the returned error names the operand.
  ffi::ErrorOr<Problem> parse(bool backward) {
    const size_t expected_args =
        3 + 3 * config_.has_bits + 3 * config_.has_intervals + config_.has_bias + (backward ? 4 : 0);
    if (args_.size() != expected_args)
      return fail("expected " + std::to_string(expected_args) + " operands, got " + std::to_string(args_.size()));
    const size_t expected_rets = backward ? 3 + config_.want_dbias : 2;
    if (rets_.size() < expected_rets)
      return fail("expected at least " + std::to_string(expected_rets) + " results, got " +
                  std::to_string(rets_.size()));
    if (config_.want_dbias && !config_.has_bias) return fail("dbias was asked for without a bias");
    if (config_.has_bits < 0 || config_.has_bits > 1 || config_.has_intervals < 0 || config_.has_intervals > 1)
      return fail("malformed config attribute");

    const ffi::AnyBuffer q = *args_.get<ffi::AnyBuffer>(0), k = *args_.get<ffi::AnyBuffer>(1),
                         v = *args_.get<ffi::AnyBuffer>(2);
    const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
    if (qd.size() < 3) return fail("q must have shape [*batch, T, N, H], got " + shape_text(qd));
    rank_ = qd.size() - 3;
    if (kd.size() != qd.size() || vd.size() != qd.size())
      return fail("k and v must have q's rank, got k " + shape_text(kd) + ", v " + shape_text(vd) + ", q " +
                  shape_text(qd));

    p_.T = qd[rank_], p_.S = kd[rank_];
    p_.N = qd[rank_ + 1], p_.K = kd[rank_ + 1], p_.H = qd[rank_ + 2], p_.Hv = vd[rank_ + 2];
    if (p_.K < 1 || p_.N % std::max(p_.K, 1) != 0)
      return fail("N must be a multiple of K, got N=" + std::to_string(p_.N) + " K=" + std::to_string(p_.K));
    if (kd[rank_ + 2] != p_.H)
      return fail("k must have q's head dimension " + std::to_string(p_.H) + ", got " + shape_text(kd));
    if (vd[rank_] != p_.S || vd[rank_ + 1] != p_.K)
      return fail("v must have k's length and heads, got v " + shape_text(vd) + ", k " + shape_text(kd));
    if (!element_type(q.element_type(), &p_.dtype)) return fail("q must be f32, bf16 or f16");
    if (k.element_type() != q.element_type() || v.element_type() != q.element_type())
      return fail("q, k and v must have one dtype");
    p_.G = p_.N / p_.K;
    p_.query_tiles = ceil_div(p_.T, queries_per_tile(p_.G));
    p_.key_tiles = ceil_div(p_.S, kKeyTile);
    p_.scale = config_.scale, p_.softcap = config_.softcap;
    p_.causal = config_.causal != 0, p_.deterministic = config_.deterministic != 0;

    // The full batch shape: the largest extent along each axis.
    full_.assign(rank_, 1);
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto dims = args_.get<ffi::AnyBuffer>(i)->dimensions();
      if (dims.size() < rank_) return fail("operand " + std::to_string(i) + " lacks batch axes: " + shape_text(dims));
      for (size_t axis = 0; axis < rank_; ++axis)
        if (dims[axis] != 1) full_[axis] = dims[axis];
    }

    const int64_t N = p_.N, K = p_.K, T = p_.T, S = p_.S;
    const int64_t words = 4 * p_.key_tiles;
    const ffi::DataType type = q.element_type();
    if (!array("q", q, type, {T, N, p_.H}, Heads::kSecond, &p_.q)) return error();
    if (!array("k", k, type, {S, K, p_.H}, Heads::kSecondShared, &p_.k)) return error();
    if (!array("v", v, type, {S, K, p_.Hv}, Heads::kSecondShared, &p_.v)) return error();
    size_t next = 3;
    if (config_.has_bits) {
      if (!mask_like("bits", next++, ffi::DataType::U32, T, words, &p_.bits)) return error();
      if (!tile_map("tiles_by_query", next++, p_.query_tiles, ceil_div(p_.key_tiles, kTilesPerWord), &p_.tiles_by_query,
                    &p_.tiles_by_query_plane))
        return error();
      if (!tile_map("tiles_by_key", next++, p_.key_tiles, ceil_div(p_.query_tiles, kTilesPerWord), &p_.tiles_by_key,
                    &p_.tiles_by_key_plane))
        return error();
    }
    if (config_.has_intervals) {
      if (!key_vector("start", next++, &p_.start) || !key_vector("end", next++, &p_.end)) return error();
      if (!tile_bounds("bounds", next++, &p_.bounds)) return error();
    }
    ffi::DataType bias_type = ffi::DataType::F32;
    if (config_.has_bias) {
      bias_type = args_.get<ffi::AnyBuffer>(next)->element_type();
      if (!element_type(bias_type, &p_.bias_dtype)) return fail("bias must be f32, bf16 or f16");
      if (!mask_like("bias", next++, bias_type, T, S, &p_.bias)) return error();
    }
    if (backward) {
      if (!array("out", *args_.get<ffi::AnyBuffer>(next++), type, {T, N, p_.Hv}, Heads::kSecond, &p_.out))
        return error();
      if (!array("lse", *args_.get<ffi::AnyBuffer>(next++), ffi::DataType::F32, {T, N, 2}, Heads::kSecond, &p_.lse))
        return error();
      if (!array("dout", *args_.get<ffi::AnyBuffer>(next++), type, {T, N, p_.Hv}, Heads::kSecond, &p_.dout))
        return error();
      if (!array("dlse", *args_.get<ffi::AnyBuffer>(next++), ffi::DataType::F32, {T, N}, Heads::kSecond, &p_.dlse))
        return error();
      if (!array("dq", result(0), type, {T, N, p_.H}, Heads::kSecond, &p_.dq, true)) return error();
      if (!array("dk", result(1), type, {S, K, p_.H}, Heads::kSecondShared, &p_.dk, true)) return error();
      if (!array("dv", result(2), type, {S, K, p_.Hv}, Heads::kSecondShared, &p_.dv, true)) return error();
      if (config_.want_dbias) {
        const ffi::AnyBuffer dbias = result(3);
        if (dbias.element_type() != bias_type) return fail("dbias must have bias's dtype");
        if (!mask_like_buffer("dbias", dbias, bias_type, T, S, &p_.dbias)) return error();
      }
    } else {
      if (!array("out", result(0), type, {T, N, p_.Hv}, Heads::kSecond, &p_.out, true)) return error();
      if (!array("lse", result(1), ffi::DataType::F32, {T, N, 2}, Heads::kSecond, &p_.lse, true)) return error();
    }
    merge_batch_axes();
    if (too_many_axes_)
      return fail("more than " + std::to_string(kMaxBatchDims) +
                  " batch axes that cannot be merged; reshape them together");
    return p_;
  }

 private:
  enum class Heads { kSecond, kSecondShared };

  ffi::Unexpected<ffi::Error> fail(const std::string& message) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, "jax_dma: " + message));
  }
  bool reject(const std::string& message) {
    rejected_ = message;
    return false;
  }
  ffi::Unexpected<ffi::Error> error() { return fail(rejected_); }

  ffi::AnyBuffer result(size_t i) { return **rets_.get<ffi::AnyBuffer>(i); }

  static bool element_type(ffi::DataType type, DType* out) {
    if (type == ffi::DataType::F32) *out = DType::kF32;
    else if (type == ffi::DataType::BF16) *out = DType::kBF16;
    else if (type == ffi::DataType::F16) *out = DType::kF16;
    else return false;
    return true;
  }

  // Strides of the batch axes, given the number of elements of one batch entry.
  bool batch_strides(const char* name, ffi::Span<const int64_t> dims, int64_t entry, View* view, bool must_be_full) {
    std::vector<int64_t> strides(rank_);
    int64_t stride = entry;
    for (size_t axis = rank_; axis-- > 0;) {
      if (dims[axis] != full_[axis] && (dims[axis] != 1 || must_be_full))
        return reject(std::string(name) + ": batch axis " + std::to_string(axis) + " must be " +
                      std::to_string(full_[axis]) + (must_be_full ? "" : " or 1") + ", got " + shape_text(dims));
      strides[axis] = dims[axis] == 1 ? 0 : stride;
      stride *= dims[axis];
    }
    pending_.push_back({view, strides});
    return true;
  }

  // [*batch, length, heads(, channels)]
  bool array(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, std::vector<int64_t> expected,
             Heads heads, View* view, bool must_be_full = false) {
    const auto dims = buffer.dimensions();
    if (buffer.element_type() != type) return reject(std::string(name) + " has the wrong dtype");
    if (dims.size() != rank_ + expected.size() || !std::equal(expected.begin(), expected.end(), dims.begin() + rank_))
      return reject(std::string(name) + " has shape " + shape_text(dims) + ", expected [*batch, ...] with trailing " +
                    shape_text({expected.data(), expected.size()}));
    const int64_t channels = expected.size() == 3 ? expected[2] : 1;
    view->data = buffer.untyped_data();
    view->col = 1, view->row = expected[1] * channels;
    view->kv = heads == Heads::kSecond ? p_.G * channels : channels;
    view->group = heads == Heads::kSecond ? channels : 0;
    return batch_strides(name, dims, expected[0] * expected[1] * channels, view, must_be_full);
  }

  void head_strides(int64_t heads, int64_t stride, View* view) {
    if (heads == 1) return;
    view->kv = heads == p_.N ? p_.G * stride : stride;
    view->group = heads == p_.N && p_.G > 1 ? stride : 0;
  }

  bool mask_like(const char* name, size_t index, ffi::DataType type, int64_t rows, int64_t cols, View* view) {
    return mask_like_buffer(name, *args_.get<ffi::AnyBuffer>(index), type, rows, cols, view);
  }

  // [*batch, N|K|1, rows|1, cols|1]
  bool mask_like_buffer(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t rows, int64_t cols,
                        View* view) {
    const auto dims = buffer.dimensions();
    if (buffer.element_type() != type) return reject(std::string(name) + " has the wrong dtype");
    if (dims.size() != rank_ + 3)
      return reject(std::string(name) + " must have rank " + std::to_string(rank_ + 3) + ", got " + shape_text(dims));
    const int64_t heads = dims[rank_], r = dims[rank_ + 1], c = dims[rank_ + 2];
    if ((heads != 1 && heads != p_.K && heads != p_.N) || (r != 1 && r != rows) || (c != 1 && c != cols))
      return reject(std::string(name) + " has shape " + shape_text(dims) + ", expected trailing [N|K|1, " +
                    std::to_string(rows) + "|1, " + std::to_string(cols) + "|1]");
    view->data = buffer.untyped_data();
    view->col = c == 1 ? 0 : 1, view->row = r == 1 ? 0 : c;
    head_strides(heads, r * c, view);
    return batch_strides(name, dims, heads * r * c, view, false);
  }

  bool tile_map(const char* name, size_t index, int64_t tiles, int64_t words, View* view, int64_t* plane) {
    const ffi::AnyBuffer buffer = *args_.get<ffi::AnyBuffer>(index);
    const auto dims = buffer.dimensions();
    if (buffer.element_type() != ffi::DataType::U32) return reject(std::string(name) + " must be u32");
    if (dims.size() != rank_ + 4 || (dims[rank_] != 1 && dims[rank_] != p_.K) ||
        (dims[rank_ + 1] != 1 && dims[rank_ + 1] != tiles) || dims[rank_ + 2] != 2 ||
        (dims[rank_ + 3] != 1 && dims[rank_ + 3] != words))
      return reject(std::string(name) + " has shape " + shape_text(dims) + ", expected trailing [K|1, " +
                    std::to_string(tiles) + "|1, 2, " + std::to_string(words) +
                    "|1]; was the plan made for other shapes?");
    const int64_t heads = dims[rank_], r = dims[rank_ + 1], w = dims[rank_ + 3];
    view->data = buffer.untyped_data();
    view->col = w == 1 ? 0 : 1, view->row = r == 1 ? 0 : 2 * w, *plane = w;
    view->kv = heads == 1 ? 0 : r * 2 * w;
    return batch_strides(name, dims, heads * r * 2 * w, view, false);
  }

  bool key_vector(const char* name, size_t index, View* view) {
    const ffi::AnyBuffer buffer = *args_.get<ffi::AnyBuffer>(index);
    const auto dims = buffer.dimensions();
    if (buffer.element_type() != ffi::DataType::S32) return reject(std::string(name) + " must be s32");
    if (dims.size() != rank_ + 2 || (dims[rank_] != 1 && dims[rank_] != p_.K && dims[rank_] != p_.N) ||
        dims[rank_ + 1] != p_.S)
      return reject(std::string(name) + " has shape " + shape_text(dims) + ", expected trailing [N|K|1, " +
                    std::to_string(p_.S) + "]");
    view->data = buffer.untyped_data();
    view->col = 1;
    head_strides(dims[rank_], p_.S, view);
    return batch_strides(name, dims, dims[rank_] * p_.S, view, false);
  }

  bool tile_bounds(const char* name, size_t index, View* view) {
    const ffi::AnyBuffer buffer = *args_.get<ffi::AnyBuffer>(index);
    const auto dims = buffer.dimensions();
    if (buffer.element_type() != ffi::DataType::S32) return reject(std::string(name) + " must be s32");
    const int64_t count = p_.key_tiles + bounded_words(p_.key_tiles);
    if (dims.size() != rank_ + 3 || (dims[rank_] != 1 && dims[rank_] != p_.K) || dims[rank_ + 1] != 4 ||
        dims[rank_ + 2] != count)
      return reject(std::string(name) + " has shape " + shape_text(dims) + ", expected trailing [K|1, 4, " +
                    std::to_string(count) + "]");
    view->data = buffer.untyped_data();
    view->col = 1, view->row = count;
    view->kv = dims[rank_] == 1 ? 0 : 4 * count;
    return batch_strides(name, dims, dims[rank_] * 4 * count, view, false);
  }

  // Drops axes of extent 1 and merges neighbours that every operand can walk with one stride.
  void merge_batch_axes() {
    std::vector<size_t> inner;  // for each merged axis, its innermost original axis
    for (size_t axis = 0; axis < rank_; ++axis) {
      p_.B *= full_[axis];
      if (full_[axis] == 1) continue;
      bool merge = !inner.empty();
      for (const auto& [view, strides] : pending_)
        if (merge && strides[inner.back()] != strides[axis] * full_[axis]) merge = false;
      if (merge) {
        inner.back() = axis;
        sizes_.back() *= full_[axis];
      } else {
        inner.push_back(axis);
        sizes_.push_back(full_[axis]);
      }
    }
    too_many_axes_ = inner.size() > kMaxBatchDims;
    if (too_many_axes_) return;
    p_.batch_rank = inner.size();
    for (size_t i = 0; i < inner.size(); ++i) {
      p_.batch_size[i] = sizes_[i];
      for (const auto& [view, strides] : pending_) view->batch[i] = strides[inner[i]];
    }
  }

  Config config_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  Problem p_;
  size_t rank_ = 0;
  std::vector<int64_t> full_, sizes_;
  std::vector<std::pair<View*, std::vector<int64_t>>> pending_;  // views into p_, to receive merged strides
  std::string rejected_;                                         // why the last operand was not accepted
  bool too_many_axes_ = false;
};

}  // namespace jax_dma

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_dma::Config, ::xla::ffi::StructMember<int64_t>("has_bits"),
                                      ::xla::ffi::StructMember<int64_t>("has_intervals"),
                                      ::xla::ffi::StructMember<int64_t>("has_bias"),
                                      ::xla::ffi::StructMember<int64_t>("causal"),
                                      ::xla::ffi::StructMember<int64_t>("want_dbias"),
                                      ::xla::ffi::StructMember<int64_t>("deterministic"),
                                      ::xla::ffi::StructMember<float>("scale"),
                                      ::xla::ffi::StructMember<float>("softcap"));
