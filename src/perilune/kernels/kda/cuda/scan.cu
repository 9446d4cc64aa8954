// The recurrence over chunks with output, as scan_chunks of triton_scan.py (without transitions):
//
//     D = U - W S        o = from_start S + P D        S <- state_decay * S + to_end^T D
//
// One CTA of 8 warps carries 32 value channels of one head through a run. S is in float32 in registers, 16 keys to a warp,
// and in bfloat16 in shared memory; three chunks' operands are there or under way. W S and from_start S share their
// operand, so only D and the new S stand between a chunk and the next.
#define BV 32
#define STAGES 3

extern "C" __global__ void __launch_bounds__(256, 1) kda_scan(
    const u16 *W, const u16 *U, const u16 *to_end, const u16 *from_start, const u16 *P, const float *state_decay,
    const int *run_first_chunk, const int *run_num_chunks, const long long *chunk_start, const int *chunk_length,
    const int *run_checkpoint, const float *initial, u16 *o, float *final_state, float *checkpoints, int o_token, int o_head,
    int H, int has_initial, int has_final, int checkpoint_every) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int stage_size = C * (3 * K + C + BV) + 2 * K;  // in u16: W, from_start, to_end, P, U, decay
  u16 *stages = (u16 *)memory, *sS = stages + STAGES * stage_size, *sD = sS + K * BV;
  const int block = blockIdx.x % (V / BV), head = blockIdx.x / (V / BV) % H, run = blockIdx.x / (V / BV) / H;
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, gr = lane >> 2, t2 = (lane & 3) * 2;
  const long long first_chunk = run_first_chunk[run];
  const int num_chunks = run_num_chunks[run];
  long long first_token = 0;
  int num_tokens = 0;
  if (num_chunks > 0) {
    first_token = chunk_start[first_chunk];
    num_tokens = (int)(chunk_start[first_chunk + num_chunks - 1] - first_token) + chunk_length[first_chunk + num_chunks - 1];
  }
  auto fetch = [&](int index, int stage) {
    if (index < num_chunks) {
      u16 *to = stages + stage * stage_size;
      const long long record = (first_chunk + index) * H + head;
#pragma unroll
      for (int j = 0; j < C * K / 2048; j++) {
        int at = spot<K>(tid / (K / 8), tid % (K / 8)) + j * 2048, from = tid * 8 + j * 2048;  // a multiple of 8 rows on
        copy16(to + at, W + record * C * K + from, true);
        copy16(to + C * K + at, from_start + record * C * K + from, true);
        copy16(to + 2 * C * K + at, to_end + record * C * K + from, true);
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
        copy16(to + 3 * C * K + spot<C>(tid / 8, tid % 8) + j * 2048, P + record * C * C + tid * 8 + j * 2048, true);
      copy16(to + 3 * C * K + C * C + spot32(tid / 4, tid % 4), U + (record * C + tid / 4) * V + block * BV + tid % 4 * 8, true);
      if (tid < K / 4) copy16(to + C * (3 * K + C + BV) + tid * 8, state_decay + record * K + tid * 4, true);
    }
    commit_copies();  // an empty group at the end keeps the count
  };
  fetch(0, 0);
  fetch(1, 1);

  const bool has_keys = 16 * w < K;
  const int key = 16 * w + gr, column = block * BV + t2;  // of S: keys `key` and `key` + 8, columns 8 n + `column` and the next
  float S[4][4] = {};
  const long long state = ((long long)run * H + head) * K * V;
  if (has_initial && has_keys)
    for (int n = 0; n < 4; n++)
      for (int i = 0; i < 2; i++) {
        float2 x = *(const float2 *)(initial + state + (long long)(key + 8 * i) * V + column + 8 * n);
        S[n][2 * i] = x.x, S[n][2 * i + 1] = x.y;
      }
  auto round_state = [&]() {
    if (has_keys)
      for (int n = 0; n < 4; n++)
        for (int i = 0; i < 2; i++)
          *(uint32_t *)(sS + spot32(key + 8 * i, n) + t2) = pack(S[n][2 * i], S[n][2 * i + 1]);
  };
  auto store_state = [&](float *to) {
    if (has_keys)
      for (int n = 0; n < 4; n++)
        for (int i = 0; i < 2; i++)
          *(float2 *)(to + (long long)(key + 8 * i) * V + column + 8 * n) = make_float2(S[n][2 * i], S[n][2 * i + 1]);
  };
  round_state();
  int checkpoint = checkpoint_every ? run_checkpoint[run] : 0, next_checkpoint = 0;
  const int m = w & 3, half = w >> 2;  // rows 16 m and columns 16 `half` of D and o
  for (int index = 0, stage = 0; index < num_chunks; index++, stage = stage == 2 ? 0 : stage + 1) {
    wait_for_copies_but_one();
    __syncthreads();
    fetch(index + 2, stage == 0 ? 2 : stage - 1);
    const u16 *sW = stages + stage * stage_size, *sF = sW + C * K, *sK = sF + C * K, *sP = sK + C * K, *sU = sP + C * C;
    const float *decay = (const float *)(sU + C * BV);
    if (checkpoint_every && index == next_checkpoint) {
      store_state(checkpoints + ((long long)checkpoint * H + head) * K * V);
      checkpoint++;
      next_checkpoint += checkpoint_every;
    }
    float written[2][2][4] = {}, out[2][4] = {};  // [even and odd steps][columns]
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      uint32_t a[4], b[4], x[4];
      const int at = spot<K>(16 * m + (lane & 15), (k >> 3) + (lane >> 4));
      ldmatrix(a, sW + at);
      ldmatrix(b, sF + at);
      ldmatrix_trans(x, sS + spot32(k + (lane & 15), 2 * half + (lane >> 4)));
      mma_bf16(written[k >> 4 & 1][0], a, x[0], x[1]);
      mma_bf16(written[k >> 4 & 1][1], a, x[2], x[3]);
      mma_bf16(out[0], b, x[0], x[1]);
      mma_bf16(out[1], b, x[2], x[3]);
    }
    for (int n = 0; n < 2; n++)
      for (int i = 0; i < 2; i++) {
        const int at = spot32(16 * m + gr + 8 * i, 2 * half + n) + t2;
        uint32_t u = *(const uint32_t *)(sU + at);
        *(uint32_t *)(sD + at) = pack(low(u) - (written[0][n][2 * i] + written[1][n][2 * i]),
                                      high(u) - (written[0][n][2 * i + 1] + written[1][n][2 * i + 1]));
      }
    if (has_keys) {
      const float d0 = decay[key], d1 = decay[key + 8];
      for (int n = 0; n < 4; n++) S[n][0] *= d0, S[n][1] *= d0, S[n][2] *= d1, S[n][3] *= d1;
    }
    __syncthreads();
    if (has_keys) {
#pragma unroll
      for (int t = 0; t < C; t += 16) {
        uint32_t a[4], x[4], y[4];
        ldmatrix_trans(a, sK + spot<K>(t + (lane >> 4) * 8 + (lane & 7), 2 * w + (lane >> 3 & 1)));
        ldmatrix_trans(x, sD + spot32(t + (lane & 15), lane >> 4));
        ldmatrix_trans(y, sD + spot32(t + (lane & 15), 2 + (lane >> 4)));
        mma_bf16(S[0], a, x[0], x[1]);
        mma_bf16(S[1], a, x[2], x[3]);
        mma_bf16(S[2], a, y[0], y[1]);
        mma_bf16(S[3], a, y[2], y[3]);
      }
      round_state();
    }
#pragma unroll
    for (int t = 0; t < C; t += 16)
      if (t <= 16 * m) {
        uint32_t a[4], x[4];
        ldmatrix(a, sP + spot<C>(16 * m + (lane & 15), (t >> 3) + (lane >> 4)));
        ldmatrix_trans(x, sD + spot32(t + (lane & 15), 2 * half + (lane >> 4)));
        mma_bf16(out[0], a, x[0], x[1]);
        mma_bf16(out[1], a, x[2], x[3]);
      }
    for (int i = 0; i < 2; i++) {
      const int local = index * C + 16 * m + gr + 8 * i;
      uint2 x = with_neighbours(pack(out[0][2 * i], out[0][2 * i + 1]), pack(out[1][2 * i], out[1][2 * i + 1]), lane);
      if (local < num_tokens)
        *(uint2 *)(o + (first_token + local) * o_token + (long long)head * o_head + block * BV + 16 * half + neighbours_column(lane)) = x;
    }
  }
  if (has_final) store_state(final_state + state);
}
