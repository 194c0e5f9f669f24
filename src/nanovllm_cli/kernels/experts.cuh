// Which rows of x and of out a block works on, and with which weight: all there are and the one that is given, or, in kernels of
// mixtures of experts, a task of route.cu's: up to TASK_ROWS rows that one expert multiplies.
//
// By macro: EXPERTS, 0 where there is no task, else which of an expert's two matrices it is: 1 for the one that follows the router,
// 2 for the one behind that. TASK_ROWS, eight where it is not said.
//
//   tasks [tasks, TASK_WORDS] int64: for each matrix four addresses (three tensors, as the kernel knows them, and the bias), then
//     int32: the number of pairs, 0 in a task that is nobody's, TASK_ROWS pairs, and zeros
//   A pair is a token and one of the `taken` experts it takes: pair p is of token p / taken. The first matrix multiplies rows of
//   tokens, the second rows of pairs, and both leave rows of pairs.
#pragma once
#include "common.cuh"

#ifndef EXPERTS
#define EXPERTS 0
#endif
#ifndef TASK_ROWS
#define TASK_ROWS 8
#endif

constexpr int MATRIX_WORDS = 4, BIAS = 3;
constexpr int TASK_WORDS = (8 * 2 * MATRIX_WORDS + 4 * (1 + TASK_ROWS) + 127) / 128 * 16;  // whole lines of memory

struct Assignment {
  const int64_t* task;
  int rows, taken;

  DEVICE Assignment(const int64_t* tasks, int rows, int taken) : task(tasks), rows(rows), taken(taken) {
    if (!EXPERTS) return;
    // The kernel before the second matrix has waited for the tasks itself.
    if (EXPERTS == 1) wait_for_previous_kernel();
    task = tasks + (int64_t)blockIdx.x * TASK_WORDS;
    this->rows = __ldcg(numbers());
  }

  // Blocks of a task have neighbouring numbers with those of others: tasks of one expert read a part of its matrix at a time.
  DEVICE int block() const { return EXPERTS ? blockIdx.y : blockIdx.x; }
  DEVICE int blocks() const { return EXPERTS ? gridDim.y : gridDim.x; }

  template <class T>
  DEVICE const T* tensor(const T* plain, int which) const {
#ifdef BUG_FIRST_MATRIX
    return EXPERTS ? reinterpret_cast<const T*>(__ldcg(task + which)) : plain;
#endif
    if (!EXPERTS) return plain;
    // The compiler is told that it lies in global memory, as it knows of a kernel's own pointers.
    return static_cast<const T*>(__cvta_global_to_generic(__ldcg(task + (EXPERTS - 1) * MATRIX_WORDS + which)));
  }

  // Where row `row` of mine is in out, and in x.
  DEVICE int place(int row) const { return EXPERTS ? __ldcg(numbers() + 1 + row) : row; }
  DEVICE int source(int row) const {
#ifdef BUG_ROW_OF_PAIR
    return place(row);
#endif
    return EXPERTS == 1 ? place(row) / taken : place(row);
  }

 private:
  DEVICE const int* numbers() const { return reinterpret_cast<const int*>(task + 2 * MATRIX_WORDS); }
};
