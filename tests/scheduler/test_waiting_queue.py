from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.waiting_queue import WaitingQueue


def filled(make_request, orders):
    queue, requests = WaitingQueue(), []
    for order in orders:
        request = Request(make_request(str(order), [1]))
        request.order = (order,)
        queue.push(request)
        requests.append(request)
    return queue, requests


def finish(queue, request):
    request.status = RequestStatus.FINISHED
    queue.forget_finished()


def test_requests_come_out_in_order(make_request):
    queue, _ = filled(make_request, [3, 1, 2])
    assert [queue.pop().order[0] for _ in range(3)] == [1, 2, 3]
    assert queue.peek() is None


def test_finished_requests_do_not_come_out(make_request):
    queue, requests = filled(make_request, range(6))
    for index in (0, 3, 5):
        finish(queue, requests[index])
    assert len(queue) == 3
    assert [queue.pop().order[0] for _ in range(3)] == [1, 2, 4]


def test_finished_requests_do_not_pile_up(make_request):
    queue, (first, *_) = filled(make_request, [0])
    for order in range(1, 1000):
        request = Request(make_request(str(order), [1]))
        request.order = (order,)
        queue.push(request)
        finish(queue, request)
        assert len(queue._heap) <= 3
    assert queue.pop() is first
